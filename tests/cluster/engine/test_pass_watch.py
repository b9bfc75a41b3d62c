"""Passes of workers: what counts as one, which rank sets its time, and when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from specserve.cluster.engine.pass_watch import DraftWatch, PassWatch, RankTimes
from specserve.engine.stragglers import MIN_PASSES, NUM_RECENT, SlowPass
from specserve.types import DraftStep, Policy, Proposal, Span, Verdict, VerifyStep, Warp
from specserve.wire.messages import Proposals, Verdicts
from tests.support.clock import Clock

STEP = VerifyStep(3, 7, (1, 2), (5,), None, Policy(Warp(), "block", seed=1, prompt_length=2))
GRAMMAR: Any = object()


def answers(*seconds: float) -> list[Verdicts]:
    """Return an answer of each rank, which drafted for a second before its pass."""
    return [
        Verdicts(1, (), 0.0, 0, spans=(Span("draft", 0.0, 1.0), Span("verify", 2.0, 2.0 + each)))
        for each in seconds
    ]


class Watched:
    """A watch, the slow passes that it found, and its clock."""

    def __init__(self, *, max_slow_s: float | None = None) -> None:
        self.found: list[SlowPass] = []
        self.clock, self.num_too_slow = Clock(), 0
        self.watch = PassWatch(
            max_slow_s=max_slow_s,
            on_slow_pass=self.found.append,
            on_too_slow=self.count_too_slow,
            clock=self.clock,
        )
        self.learn()

    def learn(self) -> None:
        for _ in range(MIN_PASSES):
            self.observe(0.125, 0.125)

    def count_too_slow(self) -> None:
        self.num_too_slow += 1

    def observe(self, *seconds: float, steps: Sequence[VerifyStep] = (STEP,)) -> str | None:
        return self.watch.observe(steps, answers(*seconds))


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_is_slow_makes_the_pass_slow(slow: int) -> None:
    watched = Watched()
    watched.observe(*([2.0, 0.125] if slow == 0 else [0.125, 2.0]))
    assert watched.found == [SlowPass(3, 2.0, 0.125)]


@pytest.mark.parametrize(
    "step",
    [replace(STEP, grammar=GRAMMAR), replace(STEP, start=0, encoder_input=(1, 2))],
    ids=["masks", "encoder input"],
)
def test_passes_whose_time_does_not_follow_from_their_tokens_are_left_out(step: VerifyStep) -> None:
    watched = Watched()
    assert watched.observe(9.0, 9.0, steps=(STEP, step)) is None
    assert watched.observe(9.0, 9.0, steps=()) is None
    assert watched.found == []


def test_lasting_slowness_ends_ranks_only_past_the_limit_and_only_if_there_is_one() -> None:
    limited, unlimited = Watched(max_slow_s=60.0), Watched()
    for _ in range(NUM_RECENT):
        for watched in (limited, unlimited):
            assert watched.observe(2.0, 2.0) is None
    for watched in (limited, unlimited):
        watched.clock.now = 61.0
    why = limited.observe(2.0, 2.0)
    assert why is not None
    assert "for 61 s most of the last 32 passes" in why
    assert "the last one 2 s instead of 0.125 s" in why
    assert unlimited.observe(2.0, 2.0) is None
    assert (limited.num_too_slow, unlimited.num_too_slow) == (1, 0)
    assert len(limited.found) == len(unlimited.found) == NUM_RECENT + 1


def test_other_ranks_are_not_compared_with_those_before_them() -> None:
    watched = Watched(max_slow_s=60.0)
    for _ in range(NUM_RECENT):
        watched.observe(2.0, 2.0)
    watched.clock.now, watched.found = 61.0, []
    watched.watch.restart()
    for _ in range(2 * MIN_PASSES):
        assert watched.observe(2.0, 2.0) is None
    assert watched.found == []


def test_each_rank_has_totals_of_its_own_which_other_processes_go_on_with() -> None:
    watch = PassWatch()
    one, other = answers(0.25, 0.5)
    watch.observe([STEP], [replace(one, seconds=1.25), replace(other, seconds=0.5)])
    watch.restart()
    watch.observe([STEP], [replace(one, seconds=0.25), replace(other, seconds=0.5)])
    assert watch.ranks == {0: RankTimes(1.5, 0.5, 2), 1: RankTimes(1.0, 1.0, 2)}


def test_passes_that_wait_for_a_grammar_are_left_out() -> None:
    watched = Watched()
    is_open, is_decided = (
        [replace(each, verdicts=(Verdict(3, 0, 0, None, is_decision=is_decision),))]
        for (each,), is_decision in ((answers(9.0), False), (answers(9.0), True))
    )
    assert watched.watch.observe([STEP], is_open) is None
    assert watched.watch.observe([STEP], is_decided) is None, "it may have waited for the end"
    assert watched.found == []
    watched.watch.observe([STEP], is_decided)
    assert watched.found == [SlowPass(3, 9.0, 0.125)]


DRAFT_STEP = DraftStep(3, 7, (1, 2), 2, STEP.policy)


def drafts(seconds: float, *, anticipated: bool | None = None) -> Proposals:
    return Proposals(1, (Proposal(3, 9, (5, 6), None, 9, anticipated=anticipated),), seconds, 0)


def test_a_slow_answer_of_the_drafter_is_found_and_ends_it_past_the_limit() -> None:
    found: list[SlowPass] = []
    now = [0.0]
    watch = DraftWatch(max_slow_s=60.0, on_slow_pass=found.append, clock=lambda: now[0])
    for _ in range(MIN_PASSES):
        watch.observe([DRAFT_STEP], drafts(0.01))
    assert watch.observe([DRAFT_STEP], drafts(1.0)) is None
    assert found == [SlowPass(4, 1.0, 0.01)]
    for _ in range(NUM_RECENT):
        assert watch.observe([DRAFT_STEP], drafts(1.0)) is None
    now[0] = 61.0
    why = watch.observe([DRAFT_STEP], drafts(1.0))
    assert why is not None
    assert "for 61 s most of the last 32 passes" in why


def test_answers_of_the_drafter_whose_time_says_nothing_are_left_out() -> None:
    found: list[SlowPass] = []
    watch = DraftWatch(on_slow_pass=found.append)
    for _ in range(MIN_PASSES):
        watch.observe([DRAFT_STEP], drafts(0.0, anticipated=True))
        watch.observe([], drafts(0.0))
        constrained = replace(DRAFT_STEP.policy, constrained=True)
        watch.observe([replace(DRAFT_STEP, policy=constrained)], drafts(0.0))
    for _ in range(MIN_PASSES + 1):
        watch.observe([DRAFT_STEP], drafts(1.0))
    assert found == []
