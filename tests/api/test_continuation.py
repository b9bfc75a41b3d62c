"""Chunks become deltas of text and tokens, and a stop string cuts both at one place."""

from __future__ import annotations

import pytest

from specserve.api.continuation import Continuation, OutputDelta
from specserve.types import Chunk, FinishReason, Logprobs, Origin, Stats
from tests.support.http_server import TEXT, demo_tokenizer

STATS = Stats("block", True, rounds=1, drafted=2, accepted=1, target_passes=1)
IDS = demo_tokenizer().encode(TEXT)


def chunks(size: int, *, finish: FinishReason = FinishReason.LENGTH) -> list[Chunk]:
    made = []
    for start in range(0, len(IDS), size):
        tokens = IDS[start : start + size]
        logprobs = tuple(Logprobs(-float(start + i), (), ()) for i in range(len(tokens)))
        last = start + size >= len(IDS)
        made.append(
            Chunk(
                0,
                start,
                tokens,
                (Origin.PLAIN,) * len(tokens),
                logprobs,
                finish if last else None,
                STATS if last else None,
            )
        )
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_deltas_join_to_the_text_and_never_hold_half_a_character(size: int) -> None:
    continuation = Continuation(demo_tokenizer(), (5, 6))
    deltas = [continuation.add_chunk(chunk) for chunk in chunks(size)]
    merged = OutputDelta.merge(deltas)
    assert merged.text == TEXT
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert merged.token_ids == tuple(continuation.token_ids) == IDS
    assert (continuation.finish, continuation.stats) == (FinishReason.LENGTH, STATS)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("stop", ["END", " of", "日本", "!", "👧"])
def test_a_stop_string_ends_text_tokens_origins_and_logprobs_at_one_place(
    size: int, stop: str
) -> None:
    continuation = Continuation(demo_tokenizer(), (5,), stop=["never", stop])
    deltas = []
    for chunk in chunks(size):
        deltas.append(continuation.add_chunk(chunk))
        if continuation.hit_stop_string:
            break
    merged = OutputDelta.merge(deltas)
    assert merged.text == TEXT[: TEXT.index(stop)]
    assert (merged.finish, deltas[-1].finish, continuation.finish) == (FinishReason.STOP,) * 3
    assert stop in demo_tokenizer().decode(continuation.token_ids)
    assert stop not in demo_tokenizer().decode(continuation.token_ids[:-1])
    assert merged.logprobs is not None
    assert len(merged.token_ids) == len(merged.origins) == len(merged.logprobs)


def test_after_a_stop_string_only_the_stats_count() -> None:
    continuation = Continuation(demo_tokenizer(), (5,), stop=["aus"])
    *_, last = [continuation.add_chunk(chunk) for chunk in chunks(4)]
    tokens = list(continuation.token_ids)
    assert (
        continuation.add_chunk(
            Chunk(
                0, len(IDS), (1, 2), (Origin.PLAIN,) * 2, finish=FinishReason.CANCELLED, stats=STATS
            )
        )
        == OutputDelta("")
        == last
    )
    assert (continuation.token_ids, continuation.finish, continuation.stats) == (
        tokens,
        FinishReason.STOP,
        STATS,
    )


def test_the_token_that_ends_a_text_is_counted_and_not_shown() -> None:
    continuation = Continuation(demo_tokenizer(), (5,))
    delta = continuation.add_chunk(
        Chunk(
            0,
            0,
            (*demo_tokenizer().encode("abc"), 0),
            (Origin.PLAIN,) * 4,
            finish=FinishReason.STOP,
            stats=STATS,
        )
    )
    assert (delta.text, delta.token_ids[-1]) == ("abc", 0)
