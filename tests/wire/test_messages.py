"""Frames: every message survives pack and unpack; any other input raises BadFrame."""

from __future__ import annotations

import math
import random
import struct
import tracemalloc
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specserve.errors import BadFrame, OutOfPages, VersionMismatch, WorkerLost
from specserve.hidden_states import HIDDEN_DTYPES, HiddenStates
from specserve.types import (
    GRAMMARS,
    VERIFIERS,
    Adapter,
    Chunk,
    DraftStep,
    FinishReason,
    Grammar,
    Logprobs,
    Origin,
    Policy,
    PreparedProposal,
    PromptLogprobs,
    PromptScoring,
    Proposal,
    Span,
    SparseDistribution,
    Stats,
    TokenRule,
    Verdict,
    VerifyStep,
    Warp,
)
from specserve.wire.codec import MAX_SALT
from specserve.wire.messages import (
    Chunks,
    Failure,
    Message,
    PreparedProposals,
    Proposals,
    Propose,
    Stop,
    Verdicts,
    Verify,
    pack,
    unpack,
)
from specserve.wire.version import RELEASE, VERSION, require_same_version

M = TypeVar("M", bound=Message)

tokens = st.integers(0, 2**32 - 1)
counts = st.integers(0, 2**64 - 1)
reals = st.floats(allow_nan=False)
many_tokens = st.lists(tokens, max_size=6).map(tuple)
many_counts = st.lists(counts, max_size=6).map(tuple)


@st.composite
def sparse_rows(draw: st.DrawFn, num_rows: int) -> SparseDistribution:
    shape = (num_rows, draw(st.integers(0, 5)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return SparseDistribution(rng.integers(0, 2**32, shape), rng.random(shape, dtype=np.float32))


@st.composite
def all_logprobs(draw: st.DrawFn) -> tuple[Logprobs, ...]:
    widths = draw(st.lists(st.integers(0, 4), max_size=4))
    return tuple(
        Logprobs(
            draw(reals),
            tuple(draw(tokens) for _ in range(width)),
            tuple(draw(reals) for _ in range(width)),
        )
        for width in widths
    )


words = st.lists(tokens, min_size=1, max_size=3).map(tuple)
rules = st.builds(
    TokenRule, counts, many_tokens, st.lists(words, max_size=3).map(tuple), many_tokens
)
scorings = st.builds(PromptScoring, st.integers(0, 20), st.none() | tokens)


@st.composite
def prompt_logprobs(draw: st.DrawFn) -> PromptLogprobs:
    rows, width = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    return PromptLogprobs(
        draw(counts),
        rng.random(rows, dtype=np.float32),
        rng.integers(1, 2**32, rows).astype(np.uint32),
        rng.integers(0, 2**32, (rows, width)).astype(np.uint32),
        -rng.random((rows, width), dtype=np.float32),
    )


warps = st.builds(
    Warp,
    reals,
    counts,
    reals,
    reals,
    reals,
    reals,
    reals,
    st.lists(st.tuples(tokens, reals), max_size=4).map(tuple),
    st.none() | rules,
)
policies = st.builds(
    Policy,
    warps,
    st.sampled_from(VERIFIERS),
    counts,
    counts,
    st.none() | counts,
    reals,
    st.booleans(),
    st.binary(max_size=MAX_SALT),
)
grammars = st.none() | st.builds(Grammar, st.sampled_from(GRAMMARS), st.text())
draft_steps = st.builds(
    DraftStep, counts, counts, many_tokens, counts, policies, many_tokens, grammars
)
verdicts = st.builds(
    Verdict,
    counts,
    counts,
    counts,
    st.none() | all_logprobs(),
    st.none() | st.text(),
    st.none() | prompt_logprobs(),
    st.booleans(),
    counts,
)
spans = st.builds(Span, st.text(), reals, reals)
stats = st.builds(
    Stats,
    st.text(),
    st.booleans(),
    *(counts for _ in range(6)),
    drafts=counts,
    accepted_by_position=st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple),
    cached_tokens=counts,
    queue_time_ms=reals,
    prefill_time_ms=reals,
)
chunks = st.builds(
    Chunk,
    counts,
    counts,
    many_tokens,
    st.lists(st.sampled_from(Origin), max_size=6).map(tuple),
    st.none() | all_logprobs(),
    st.none() | st.sampled_from(FinishReason),
    st.none() | stats,
    st.none() | st.text(),
    st.none() | prompt_logprobs(),
)


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    drafts = draw(many_tokens)
    return Proposal(
        draw(counts),
        draw(counts),
        drafts,
        draw(st.none() | sparse_rows(len(drafts))),
        draw(counts),
        draw(st.none() | st.booleans()),
    )


@st.composite
def verify_steps(draw: st.DrawFn) -> VerifyStep:
    drafts = draw(many_tokens)
    q = draw(st.none() | sparse_rows(len(drafts)))
    more = draw(policies), draw(st.booleans()), draw(many_tokens), draw(grammars), draw(counts)
    scoring = draw(st.none() | scorings)
    return VerifyStep(draw(counts), draw(counts), draw(many_tokens), drafts, q, *more, scoring)


@st.composite
def hidden_states(draw: st.DrawFn) -> tuple[HiddenStates, ...]:
    """Return states of many sequences: more than the items that an array of the head may have."""
    dtype, width = draw(st.sampled_from(HIDDEN_DTYPES)), draw(st.integers(0, 3))
    rows = draw(st.lists(st.integers(1, 3), max_size=30))
    return tuple(
        HiddenStates(
            draw(counts), draw(counts), num, dtype, bytes(i % 256 for i in range(num * width))
        )
        for num in rows
    )


def some(items: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(items, max_size=4).map(tuple)


messages = st.one_of(
    st.builds(
        Propose, counts, st.just(math.inf) | reals, some(draft_steps), many_counts, hidden_states()
    ),
    st.builds(Proposals, counts, some(proposals()), reals, counts, some(spans)),
    st.builds(PreparedProposals, counts, some(st.builds(PreparedProposal, counts, proposals()))),
    st.builds(Verify, counts, some(verify_steps()), many_counts),
    st.builds(
        Verdicts,
        counts,
        some(verdicts),
        reals,
        counts,
        counts,
        counts,
        some(spans),
        hidden_states(),
    ),
    st.builds(Failure, counts, st.text(), st.text()),
    st.builds(Chunks, some(chunks)),
    st.just(Stop()),
)


def plain(value: object) -> object:
    """Return the value with its types, so that True is not 1, and with arrays by their bits.

    == cannot compare those.
    """
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if is_dataclass(value):
        return type(value), [plain(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, memoryview):
        value = bytes(value)
    return [plain(each) for each in value] if isinstance(value, tuple) else (type(value), value)


def sent(message: Message) -> list[bytes]:
    """Return the frames as a socket delivers them."""
    return [bytes(frame) for frame in pack(message)]


def received(message: M) -> M:
    """Return what the other side makes of a message, which must be of the same kind."""
    found = unpack(sent(message))
    assert type(found) is type(message)
    return found


def policy(**changes: Any) -> Policy:
    return Policy(Warp(), "block", **{"seed": 2**64 - 1, "prompt_length": 9} | changes)


def verify(num_steps: int = 2) -> Verify:
    rng = np.random.default_rng(0)
    rows = [
        SparseDistribution(rng.integers(0, 4000, (5, 64)), rng.random((5, 64), dtype=np.float32))
        for _ in range(num_steps)
    ]
    return Verify(
        3,
        tuple(
            VerifyStep(i, 400, (5,), (1, 2, 3, 4, 5), q, policy(seed=i)) for i, q in enumerate(rows)
        ),
        (7, 8),
    )


def samples() -> list[Message]:
    return [
        verify(),
        Propose(
            1,
            math.inf,
            (
                DraftStep(
                    1,
                    2,
                    (3, 4),
                    5,
                    Policy(
                        Warp(rule=TokenRule(3, (2,), ((5,), (6, 7)), (1, 2, 7))),
                        "coupled",
                        1,
                        9,
                        logprobs=0,
                        constrained=True,
                        cache_salt=b"\0salt",
                        adapter=Adapter("sql", "/adapters/sql", b"\0version"),
                    ),
                    (9, 8),
                    Grammar("regex", "a+"),
                ),
            ),
            (6,),
        ),
        Verdicts(
            1,
            (
                Verdict(
                    1, 1, 2, (Logprobs(-0.1, (1, 2), (-0.1, -math.inf)), Logprobs(-9.0, (), ()))
                ),
            ),
            0.1,
            3,
        ),
        Chunks(
            (
                Chunk(
                    1,
                    7,
                    (2,),
                    (Origin.BONUS,),
                    None,
                    FinishReason.ERROR,
                    Stats("block", True, 1, 2, 3, 4, irreproducible="experts"),
                    "fällt aus",
                ),
            )
        ),
        Failure(1, "OutOfPages", "no room"),
        Stop(),
    ]


@settings(max_examples=300, deadline=None)
@given(messages)
def test_every_message_survives_pack_and_unpack(message: Message) -> None:
    assert plain(unpack(sent(message))) == plain(message)


def test_arrays_are_read_only_views_of_one_frame() -> None:
    first, second = (step.q for step in received(verify()).steps)
    assert first is not None
    assert second is not None
    arrays: list[tuple[NDArray[Any], type]] = [
        (second.ids, np.int64),
        (second.probs, np.float32),
    ]
    for array, dtype in arrays:
        assert array.dtype == dtype
        assert array.base is not None
        assert not array.flags.writeable
    assert first.probs.base is not None
    assert second.probs.base is not None
    assert np.shares_memory(first.probs.base, second.probs.base)


def test_a_round_of_32_sequences_takes_two_frames_and_8_bytes_a_pair() -> None:
    head, arrays = sent(verify(32))
    assert len(head) < 32 * 200
    assert len(arrays) == 32 * 5 * 64 * 8


def test_states_are_a_view_of_a_frame_of_their_own_without_a_copy() -> None:
    hidden = tuple(HiddenStates(i, 4, 2, "bfloat16", bytes([i]) * 96) for i in range(40))
    frames = sent(Verdicts(1, (), 0.0, 0, hidden=hidden))
    assert [len(frame) for frame in frames[1:]] == [0, 40 * 96]
    got = unpack(frames)
    assert isinstance(got, Verdicts)
    assert got.hidden == hidden
    assert all(isinstance(each.data, memoryview) for each in got.hidden)
    assert [memoryview(each.data).obj is frames[2] for each in got.hidden] == [True] * 40
    assert sent(Propose(1, 0.0, (), hidden=got.hidden))[1:] == frames[1:], "they are sent on"


def test_arrays_that_are_not_contiguous_are_packed_in_order() -> None:
    ids, probs = (
        np.arange(24).reshape(4, 6)[:, ::2],
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
    )
    proposal = Proposal(1, 2, (1, 2, 3, 4), SparseDistribution(ids, probs), 3)
    got = received(Proposals(1, (proposal,), 0.0, 0)).proposals[0].q
    assert got is not None
    assert got.ids.tolist() == ids.tolist()
    assert got.probs.tolist() == probs.tolist()


def test_integers_in_float_fields_are_received_as_floats() -> None:
    step = DraftStep(1, 2, (3,), 4, Policy(Warp(temperature=0), "block", 0, 1, lenience=1))
    got = received(Propose(1, 2, (step,))).steps[0].policy
    assert (type(got.warp.temperature), type(got.lenience)) == (float, float)


def test_a_failure_is_received_as_the_original_exception() -> None:
    error = received(Failure.from_error(4, OutOfPages("no room"))).error()
    assert type(error) is OutOfPages
    assert str(error) == "no room"


@pytest.mark.parametrize("kind", ["ZeroDivisionError", "SystemExit", "annotations", "__name__", ""])
def test_a_failure_of_an_unknown_kind_is_worker_lost(kind: str) -> None:
    error = Failure(4, kind, "why").error()
    assert type(error) is WorkerLost
    assert "why" in str(error)


def test_an_error_message_that_is_not_unicode_is_still_sent() -> None:
    assert unpack(sent(Failure(1, "OSError", "file \udcff"))) == Failure(
        1, "OSError", "file \\udcff"
    )


@pytest.mark.parametrize(
    "frames",
    [
        [msgpack.packb((b"specserve", VERSION + 1, "Stop", 0, ()))],
        [msgpack.packb((b"specserve", VERSION + 1, {}, [0] * 99, "more", "fields"))],
        [msgpack.packb((b"specserve", VERSION + 1)), b"", b""],
    ],
    ids=["same shape", "other fields", "other frames"],
)
def test_another_version_is_refused_and_both_are_named(frames: list[bytes]) -> None:
    with pytest.raises(
        VersionMismatch, match=rf"version {VERSION + 1}\b.* version {VERSION}\b"
    ) as refused:
        unpack(frames)
    assert f"(specserve {RELEASE})" in str(refused.value)


def test_the_refusal_of_another_version_names_the_releases_that_are_known() -> None:
    require_same_version(VERSION, "1.2.3")
    with pytest.raises(VersionMismatch, match=rf"version {VERSION - 1} \(specserve 1\.2\.3\)"):
        require_same_version(VERSION - 1, "1.2.3")
    with pytest.raises(VersionMismatch, match="no known protocol version, and"):
        require_same_version("10.0.0.1", 5)


NO_HIDDEN = (b"", "")
HIDDEN_OF_6_BYTES = struct.pack("<QQQQ", 1, 0, 3, 6)


def head(
    *,
    magic: object = b"specserve",
    kind: object = "Verdicts",
    num_items: object = 1,
    own: object = None,
    rows: tuple[object, ...],
) -> bytes:
    own = (bytes(40), (), NO_HIDDEN) if own is None else own
    return b"".join(map(msgpack.packb, ((magic, VERSION, kind, num_items, own), *rows)))


GOOD_ROW = (bytes(33), None, None, None)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"", b""],
        [b"\x00"],
        [b"GET / HTTP/1.1"],
        [head(rows=(GOOD_ROW,)), b"", b""],
        [head(rows=(GOOD_ROW,)), bytes(8)],
        [head(rows=(GOOD_ROW,)), bytes(7)],
        [head(rows=(GOOD_ROW,)) + b"\xc0"],
        [head(rows=(GOOD_ROW,)) + b"\xc5"],
        [head(rows=())],
        [head(rows=(GOOD_ROW, GOOD_ROW))],
        [head(num_items=-1, rows=())],
        [head(num_items=2**63, rows=(GOOD_ROW,))],
        [head(num_items=1.0, rows=(GOOD_ROW,))],
        [head(num_items="1", rows=(GOOD_ROW,))],
        [head(magic=b"someone", rows=(GOOD_ROW,))],
        [head(magic="specserve", rows=(GOOD_ROW,))],
        [head(kind="Gossip", rows=(GOOD_ROW,))],
        [head(kind=b"Verdicts", rows=(GOOD_ROW,))],
        [head(kind=("Verdicts",), rows=(GOOD_ROW,))],
        [head(kind="Stop", num_items=0, own=(1,), rows=())],
        [head(kind="Stop", num_items=1, own=(), rows=(GOOD_ROW,))],
        [head(kind="Failure", num_items=1, own=(bytes(8), "a", "b"), rows=(GOOD_ROW,))],
        [head(own=(), rows=(GOOD_ROW,))],
        [head(own=("x" * 40, (), NO_HIDDEN), rows=(GOOD_ROW,))],
        [head(own=(bytes(40), ((bytes(16), "verify"),), NO_HIDDEN), rows=(GOOD_ROW,))],
        *(
            [head(own=(bytes(40), (), hidden), rows=(GOOD_ROW,)), b"", *states]
            for hidden, *states in (
                (NO_HIDDEN, bytes(6)),
                ((HIDDEN_OF_6_BYTES, "bfloat16"), bytes(5)),
                ((HIDDEN_OF_6_BYTES, "bfloat16"), bytes(7)),
                ((HIDDEN_OF_6_BYTES, "int8"), bytes(6)),
                ((HIDDEN_OF_6_BYTES, b"float32"), bytes(6)),
                ((HIDDEN_OF_6_BYTES[:-1], "float32"), bytes(6)),
                ((struct.pack("<QQQQ", 1, 0, 0, 6), "float32"), bytes(6)),
                ((struct.pack("<QQQQ", 1, 0, 4, 6), "float32"), bytes(6)),
                ((HIDDEN_OF_6_BYTES,), bytes(6)),
            )
        ),
        [head(rows=(b"",))],
        [head(rows=((bytes(23), None, None),))],
        [head(rows=((bytes(33), None, None),))],
        [head(rows=((bytes(33), None, 7, None),))],
        [head(rows=((bytes(33), (bytes(8), bytes(4), bytes(4), b""), None, None),))],
        [head(rows=((bytes(33), (bytes(8), b"\xff\xff\xff\xff", b"", b""), None, None),))],
        [head(rows=((bytes(33), (bytes(7), b"", b"", b""), None, None),))],
        [head(rows=((bytes(33), None, None, (bytes(16), b"", b"", b"")),))],
        [head(rows=((bytes(33), None, None, (bytes(15), b"", b"", b"", b"")),))],
        [head(rows=((bytes(33), None, None, (bytes(16), bytes(4), b"", b"", b"")),))],
        [head(rows=((bytes(33), None, None, (bytes(16), bytes(3), b"", b"", b"")),))],
        [head(rows=((bytes(33), None, None, (bytes(16), "", b"", b"", b"")),))],
        [head(rows=((bytes(33), None, None, (b"\xff" * 16, b"", b"", b"", b"")),))],
        [head(rows=({},))],
        [head(rows=({1: 2},))],
        [head(rows=(msgpack.ExtType(5, b"x"),))],
        [
            head(rows=(GOOD_ROW,))[: -len(msgpack.packb(GOOD_ROW))] + b"\xc7\x00\xff"
        ],  # a timestamp without its bytes
        [head(rows=(tuple(range(17)),))],
    ],
)
def test_malformed_frames_are_refused(frames: list[bytes]) -> None:
    good = unpack([head(rows=(GOOD_ROW,))])
    assert isinstance(good, Verdicts)
    assert good.verdicts == (Verdict(0, 0, 0, None, is_decision=False),)
    with pytest.raises(BadFrame):
        unpack(frames)


def test_a_grammar_of_no_known_kind_is_refused() -> None:
    (frame,) = sent(
        Propose(1, 1.0, (DraftStep(1, 0, (3,), 5, policy(), (), Grammar("regex", "a+")),))
    )
    assert isinstance(unpack([frame]), Propose)
    with pytest.raises(BadFrame, match="kind of grammar"):
        unpack([frame.replace(b"regex", b"regeX")])


def test_rows_wider_than_their_frame_are_refused() -> None:
    narrow, arrays = sent(verify(1))
    wide = narrow.replace((64).to_bytes(4, "little"), (2**32 - 1).to_bytes(4, "little"))
    assert wide != narrow
    with pytest.raises(BadFrame):
        unpack([wide, arrays])


@pytest.mark.parametrize(
    "level",
    [
        b"\x9f",
        b"\xdc\x00\x10",
        b"\xdd\x00\x00\x00\x10",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
)
@pytest.mark.parametrize("opening", [b"", head(rows=())])
def test_nested_heads_that_claim_large_sizes_take_little_memory(
    level: bytes, opening: bytes
) -> None:
    bomb = opening + level * 5000
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame):
            unpack([bomb])
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def survive(frames: list[bytes]) -> bool:
    """Return True if the frames are a message. Any exception but BadFrame fails the test."""
    try:
        message = unpack(frames)
    except BadFrame:
        return False
    sent(message)  # and the message can be sent on
    return True


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=3))
def test_random_frames_raise_nothing_but_bad_frame(frames: list[bytes]) -> None:
    assert not survive(frames)


def test_truncated_messages_are_refused_wherever_they_are_cut() -> None:
    for message in samples():
        frames = sent(message)
        for number, frame in enumerate(frames):
            for stop in range(0, len(frame), 1 + len(frame) // 400):
                assert not survive([*frames[:number], frame[:stop], *frames[number + 1 :]])


def test_flipped_bits_and_swapped_bytes_give_a_message_or_bad_frame() -> None:
    rng, outcomes = random.Random(0), {True: 0, False: 0}
    for message in samples():
        first, *rest = sent(message)
        for _ in range(2000):
            damaged = bytearray(first)
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            if rng.random() < 0.3:
                damaged[rng.randrange(len(damaged))] = rng.choice(
                    b"\x90\x9f\xc0\xc4\xc7\xcb\xd4\xdd\xdf\xff"
                )
            outcomes[survive([bytes(damaged), *rest])] += 1
    assert outcomes[True] > 100
    assert outcomes[False] > 1000
