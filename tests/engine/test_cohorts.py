"""Two cohorts in turn: one is drafted for while the other is verified, and no text changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from specserve.engine import pacer
from specserve.engine.cohorts import expected_speedup
from specserve.types import Chunk, Request, Warp
from tests.support.fakes import FakeDrafter, FakeTarget, model_info, open_coordinator, text


@pytest.fixture
def two_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two cohorts always pay."""
    monkeypatch.setattr(pacer, "_MIN_COHORTS_GAIN", 0.0)


@pytest.mark.parametrize("num_crashes", [0, 3])
@pytest.mark.usefixtures("two_cohorts")
def test_two_cohorts_take_turns_and_change_no_text(num_crashes: int) -> None:
    texts: dict[int, tuple[int, ...]] = {}
    info = model_info()
    target, drafter = FakeTarget(info), FakeDrafter(0.8)

    def emit(chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            texts[chunk.seq_id] += chunk.tokens

    coordinator = open_coordinator(
        target, drafter, info=info, emit=emit, gamma=3, remote_workers=True
    )
    prompts = [(i, 2, 3) for i in range(8)]
    for prompt in prompts:
        texts[coordinator.submit(Request(prompt, 80, Warp(), seed=1))] = ()

    async def play() -> None:
        num_rounds = 0
        while coordinator.has_work:
            await coordinator.round()
            num_rounds += 1
            if num_rounds % 10 == 0 and num_rounds <= 10 * num_crashes:
                target.errors.append(RuntimeError("the card fell off the bus"))
                target.caches.clear()

    asyncio.run(play())
    assert list(texts.values()) == [text(prompt, 80) for prompt in prompts]
    assert target.caches == drafter.caches == {}
    batches = [{step.seq_id for step in steps} for steps in target.rounds[:8]]
    assert [len(batch) for batch in batches] == [4] * 8
    assert all(not one & other for one, other in pairwise(batches)), "the halves take turns"


@pytest.mark.usefixtures("two_cohorts")
def test_a_cancelled_sequence_is_not_verified_any_more() -> None:
    emitted: list[Chunk] = []
    info = model_info()
    target = FakeTarget(info)
    coordinator = open_coordinator(
        target, FakeDrafter(0.8), info=info, emit=emitted.extend, gamma=3, remote_workers=True
    )
    first, second = (coordinator.submit(Request((i, 2, 3), 80, Warp(), seed=1)) for i in range(2))

    async def play() -> None:
        await coordinator.round()  # the first half has its proposals
        coordinator.cancel(first)
        while coordinator.has_work:
            await coordinator.round()

    asyncio.run(play())
    assert all(step.seq_id == second for steps in target.rounds for step in steps)
    tokens = [token for chunk in emitted if chunk.seq_id == second for token in chunk.tokens]
    assert tuple(tokens) == text((1, 2, 3), 80)


def test_two_cohorts_pay_where_passes_for_half_cost_half_and_never_for_one_sequence() -> None:
    steep = expected_speedup(
        8, 4, accepted=3.0, half_verify_seconds=0.01, plain_seconds=0.01, draft_pass_seconds=0.002
    )
    flat = expected_speedup(
        8, 4, accepted=3.0, half_verify_seconds=0.02, plain_seconds=0.01, draft_pass_seconds=0.002
    )
    assert steep == pytest.approx(2.0)
    assert flat == pytest.approx(1.0)
    alone = expected_speedup(
        1, 4, accepted=3.0, half_verify_seconds=0.01, plain_seconds=0.01, draft_pass_seconds=0.002
    )
    assert alone == 1.0
