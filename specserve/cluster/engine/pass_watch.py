"""Watch the passes of workers: find slow ones, and workers that should run elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specserve.engine.stragglers import NUM_RECENT, SLOW_FACTOR, PassMedians, SlowPass
from specserve.types import DraftStep, VerifyStep
from specserve.wire.messages import Proposals, Verdicts


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Totals of one rank since the engine began, over all processes that it has been."""

    busy_seconds: float = 0.0  # drafting included, where the draft lives with the target
    pass_seconds: float = 0.0
    num_passes: int = 0

    def after(self, answer: Verdicts) -> RankTimes:
        """Return the totals with one more pass."""
        return RankTimes(
            self.busy_seconds + answer.seconds,
            self.pass_seconds + _verify_seconds(answer),
            self.num_passes + 1,
        )

    def since(self, earlier: RankTimes) -> RankTimes:
        """Return what has been added to earlier totals."""
        return RankTimes(
            self.busy_seconds - earlier.busy_seconds,
            self.pass_seconds - earlier.pass_seconds,
            self.num_passes - earlier.num_passes,
        )


class SlowPasses:
    """The pass times of the workers that are attached, and what is done about slow ones."""

    def __init__(
        self,
        *,
        max_slow_s: float | None = None,
        on_slow_pass: Callable[[SlowPass], None] | None = None,
        on_too_slow: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_slow_s, self._clock = max_slow_s, clock
        self._on_slow_pass, self._on_too_slow = on_slow_pass, on_too_slow
        self._times = PassMedians()

    def restart(self) -> None:
        """Start from nothing: other workers are attached, perhaps on other devices."""
        self._times.clear()

    def _include(self, num_tokens: int, num_cached: int, seconds: float) -> str | None:
        """Include a pass; return why its workers are too slow to go on with, or None."""
        now = self._clock()
        slow = self._times.observe(num_tokens, num_cached, seconds, now=now)
        if slow is None:
            return None
        if self._on_slow_pass is not None:
            self._on_slow_pass(slow)
        slow_for = self._times.slow_for(now)
        if self._max_slow_s is None or slow_for < self._max_slow_s:
            return None
        if self._on_too_slow is not None:
            self._on_too_slow()
        return (
            f"for {slow_for:.0f} s most of the last {NUM_RECENT} passes have taken more than "
            f"{SLOW_FACTOR:g} times as long as usual, the last one {slow.seconds:.3g} s "
            f"instead of {slow.expected_seconds:.3g} s"
        )


class PassWatch(SlowPasses):
    """The passes of a target's ranks, which wait for each other: the slowest sets their time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ranks: dict[int, RankTimes] = {}  # since the first round
        self._has_undecided = False  # the last pass left a verdict open

    def observe(self, steps: Sequence[VerifyStep], answers: Sequence[Verdicts]) -> str | None:
        """Include a pass; return why its ranks are too slow to go on with, or None.

        Passes that read encoder input or wait for grammars are left out, since their times do not
        follow from their tokens.
        """
        for rank, answer in enumerate(answers):
            self.ranks[rank] = self.ranks.get(rank, RankTimes()).after(answer)
        if not steps or any(
            step.grammar is not None or (step.encoder_input and not step.start) for step in steps
        ):
            return None
        if self._waits_for_grammars(answers):
            return None
        return self._include(
            sum(len(step.tokens) + len(step.drafts) for step in steps),
            sum(step.start for step in steps),
            max(map(_verify_seconds, answers)),
        )

    def _waits_for_grammars(self, answers: Sequence[Verdicts]) -> bool:
        """Return whether this pass has left a verdict open, or the last one had."""
        waited = self._has_undecided
        self._has_undecided = not all(
            verdict.is_decision for answer in answers for verdict in answer.verdicts
        )
        return waited or self._has_undecided


class DraftWatch(SlowPasses):
    """The answers of a drafter apart. The passes of one count as a single pass."""

    def observe(self, steps: Sequence[DraftStep], answer: Proposals) -> str | None:
        """Include an answer; return why the drafter is too slow to go on with, or None.

        Answers with proposals that were prepared before are left out, since those take no time,
        and answers under grammars or with encoder input.
        """
        if not steps or any(
            step.policy.constrained or (step.encoder_input and not step.start) for step in steps
        ):
            return None
        if any(proposal.anticipated for proposal in answer.proposals):
            return None
        return self._include(
            sum(len(step.tokens) for step in steps)
            + sum(len(proposal.tokens) for proposal in answer.proposals),
            sum(step.start for step in steps),
            answer.seconds,
        )


def _verify_seconds(answer: Verdicts) -> float:
    return sum(span.end - span.start for span in answer.spans if span.name == "verify")
