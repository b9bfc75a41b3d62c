"""Two cohorts in turn: one is drafted for while the other is verified, and no text changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from specserve.engine import pacer
from specserve.engine.cohorts import expected_speedup
from specserve.errors import TargetReplaced, WorkerLost
from specserve.types import Chunk, DraftStep, Proposal, Request, Verdict, VerifyStep, Warp
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


@pytest.mark.parametrize("error", [WorkerLost("killed"), TargetReplaced("between two cohorts")])
@pytest.mark.usefixtures("two_cohorts")
def test_a_target_lost_while_the_other_half_is_drafted_for_loses_and_repeats_no_token(
    error: WorkerLost,
) -> None:
    info = model_info()
    target, drafter = FakeTarget(info), SlowDrafter(0.8)
    texts: dict[int, tuple[int, ...]] = {}
    losses: list[int] = []

    def emit(chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            assert chunk.start == len(texts[chunk.seq_id]), "a token was lost or repeated"
            texts[chunk.seq_id] += chunk.tokens

    coordinator = open_coordinator(
        target, drafter, info=info, emit=emit, gamma=3, remote_workers=True
    )
    prompts = [(i, 2, 3) for i in range(8)]
    for prompt in prompts:
        texts[coordinator.submit(Request(prompt, 80, Warp(), seed=1))] = ()
    verify = target.verify

    async def dying(steps: Sequence[VerifyStep]) -> list[Verdict]:
        if drafter.is_drafting and len(target.rounds) % 7 == 3:
            losses.append(len(steps))
            target.caches.clear()
            target.rounds.append(steps)
            raise error
        return await verify(steps)

    target.verify = dying  # type: ignore[method-assign]

    async def play() -> None:
        while coordinator.has_work:
            await coordinator.round()

    asyncio.run(play())
    assert list(texts.values()) == [text(prompt, 80) for prompt in prompts]
    assert target.caches == drafter.caches == {}
    assert losses.count(4) > 3, "the target was never lost between two cohorts"


class SlowDrafter(FakeDrafter):
    """Drafter that takes longer than the target's verification."""

    is_drafting = False

    async def propose(self, steps: Sequence[DraftStep], deadline: float) -> list[Proposal]:
        self.is_drafting = True
        for _ in range(5):
            await asyncio.sleep(0)
        self.is_drafting = False
        return await super().propose(steps, deadline)


@pytest.mark.usefixtures("two_cohorts")
def test_an_exception_between_two_cohorts_leaves_neither_of_them_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = model_info()
    drafter = SlowDrafter(0.8)
    emitted: list[Chunk] = []
    coordinator = open_coordinator(
        FakeTarget(info), drafter, info=info, emit=emitted.extend, gamma=3, remote_workers=True
    )
    for i in range(4):
        coordinator.submit(Request((i, 2, 3), 80, Warp(), seed=1))

    def broken(*args: object, **options: object) -> None:
        assert drafter.is_drafting
        raise ZeroDivisionError("division by zero")

    async def play() -> None:
        for _ in range(4):
            await coordinator.round()
        monkeypatch.setattr(coordinator.pacer, "observe", broken)
        await asyncio.wait_for(coordinator.run(), 5)
        assert not drafter.is_drafting

    asyncio.run(play())
    assert coordinator.trouble == "the coordinator failed: division by zero"
    assert sum(chunk.finish is not None for chunk in emitted) == 4


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
