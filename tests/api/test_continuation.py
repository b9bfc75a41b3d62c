"""From chunks to pieces: text, tokens, and where a stop string cuts both."""

from __future__ import annotations

import pytest

from specserve.api.continuation import Continuation, Piece
from specserve.types import Chunk, Finish, Logprobs, Origin, Stats
from tests.support.http_server import TEXT, demo_text

STATS = Stats("block", True, rounds=1, drafted=2, accepted=1, target_passes=1)
IDS = demo_text().encode(TEXT)


def chunks(size: int, *, finish: Finish = Finish.LENGTH) -> list[Chunk]:
    made = []
    for start in range(0, len(IDS), size):
        tokens = IDS[start : start + size]
        logprobs = tuple(Logprobs(-float(start + i), (), ()) for i in range(len(tokens)))
        last = start + size >= len(IDS)
        made.append(
            Chunk(
                0,
                tokens,
                (Origin.PLAIN,) * len(tokens),
                logprobs,
                finish if last else None,
                STATS if last else None,
            )
        )
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_pieces_join_to_the_text_and_never_hold_half_a_character(size):
    continuation = Continuation(demo_text(), (5, 6))
    pieces = [continuation.take(chunk) for chunk in chunks(size)]
    joined = Piece.joined(pieces)
    assert joined.text == TEXT
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert joined.token_ids == tuple(continuation.token_ids) == IDS
    assert (continuation.finish, continuation.stats) == (Finish.LENGTH, STATS)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("stop", ["END", " of", "日本", "!", "👧"])
def test_a_stop_string_ends_text_tokens_origins_and_logprobs_at_one_place(size, stop):
    continuation = Continuation(demo_text(), (5,), stop=["never", stop])
    pieces = []
    for chunk in chunks(size):
        pieces.append(continuation.take(chunk))
        if continuation.stopped:
            break
    joined = Piece.joined(pieces)
    assert joined.text == TEXT[: TEXT.index(stop)]
    assert (joined.finish, pieces[-1].finish, continuation.finish) == (Finish.STOP,) * 3
    assert stop in demo_text().decode(continuation.token_ids)
    assert stop not in demo_text().decode(continuation.token_ids[:-1])
    assert len(joined.token_ids) == len(joined.origins) == len(joined.logprobs)


def test_after_a_stop_string_only_the_stats_count():
    continuation = Continuation(demo_text(), (5,), stop=["aus"])
    *_, last = [continuation.take(chunk) for chunk in chunks(4)]
    tokens = list(continuation.token_ids)
    assert (
        continuation.take(
            Chunk(0, (1, 2), (Origin.PLAIN,) * 2, finish=Finish.CANCELLED, stats=STATS)
        )
        == Piece("")
        == last
    )
    assert (continuation.token_ids, continuation.finish, continuation.stats) == (
        tokens,
        Finish.STOP,
        STATS,
    )


def test_the_token_that_ends_a_text_is_counted_and_not_shown():
    continuation = Continuation(demo_text(), (5,))
    piece = continuation.take(
        Chunk(
            0, (*demo_text().encode("abc"), 0), (Origin.PLAIN,) * 4, finish=Finish.STOP, stats=STATS
        )
    )
    assert (piece.text, piece.token_ids[-1]) == ("abc", 0)
