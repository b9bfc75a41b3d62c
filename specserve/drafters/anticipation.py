"""Anticipation: prepare the next proposals for likely outcomes while the target verifies.

Knows no model, and no clock but the one it is given.

An outcome is how many draft tokens are accepted and which token comes next. For the likelier
outcomes the sequence is forked and drafted from, all branches in one pass a depth. The next step is
itself the key: it matches one branch, which then replaces the sequence, or none. A prepared
proposal is token for token the one that would be drafted later: anticipation changes only when it
is drafted. A head on the target's hidden states is no such drafter: it goes on from its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from specserve.drafters.base import ForkableDrafter, OutcomeForecast, never
from specserve.drafters.branch_budget import IdleTime
from specserve.drafters.branch_passes import BranchPasses
from specserve.drafters.branch_set import BranchSet
from specserve.drafters.branches import Fanout, ObservedOutcome
from specserve.drafters.drafting_round import DraftingRound, steps_without_room
from specserve.drafters.prepared_branches import PreparedBranches
from specserve.types import DraftStep, PreparedProposal, Proposal

MIN_ALL_HIT_PROBABILITY = 0.25
"""Prepared proposals are sent in advance if all sequences hit with at least this probability.

The coordinator can skip the wait only if all of them do.
"""
HIT_RATE_WEIGHT = 0.1
"""Weight of the newest hit or miss in their running mean."""


class Anticipation:
    """The drafter of one engine, which works between two messages: `prepare` after every answer.

    Releases are postponed, too, until they delay no answer. `propose` and `prepare` are passes of
    the drafter between the methods below them, which make none for likely outcomes; who has several
    engines calls those for each, and makes their passes in one.
    """

    def __init__(
        self,
        drafter: ForkableDrafter,
        fanout: Fanout,
        *,
        clock: Callable[[], float],
        passes: BranchPasses | None = None,
    ) -> None:
        self._drafter, self._fanout, self._clock = drafter, fanout, clock
        self._passes = passes or BranchPasses(drafter, fanout, clock=clock)
        self._branches = BranchSet(self._passes)
        self._idle = IdleTime(clock)
        self.is_due = False
        """True from a message until what was prepared before it is discarded."""
        self.answered: list[DraftStep] = []  # with draft tokens, and without a forecast yet
        self.undrafted: list[DraftStep] = []  # whose draft tokens would have come too late
        self._postponed: list[DraftStep] = []  # steps that only fill the cache
        self._outcomes: list[ObservedOutcome] = []  # that the fan-out has yet to learn from
        self.num_hits = self.num_misses = 0
        self._hit_rate = 0.0

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """Return one proposal for each step; past the deadline they are shorter.

        Prepared proposals that are shorter than wanted grow only where there is no deadline. A step
        that would be drafted for past the deadline, or with gamma 0, gets no draft tokens and is
        prefilled afterwards.
        """
        asked = self.begin(steps, deadline)
        found = self._drafter.draft(asked.drafting, lambda: self._clock() > deadline)
        asked.add(found)
        if without_room := steps_without_room(asked.drafting, found):
            self.discard_branches()
            if self._passes.release_discarded():
                asked.add(self._drafter.draft(without_room, lambda: self._clock() > deadline))
        self.end(asked)
        return asked.answer()

    def prepare(self, has_message: Callable[[], bool]) -> None:
        """Prepare the next proposals until nothing is left to do or a message arrives.

        `has_message` is called between passes.
        """
        self._prefill(self.take_postponed())
        self.settle()
        self._passes.release_discarded()
        if not self.has_work:
            self.on_prepared()
            return
        if has_message():
            return
        if self.num_unforecast:
            self.add_forecasts(
                self._drafter.forecast_outcomes(
                    [step.seq_id for step in self.answered],
                    self._passes.budget.width(self.num_unforecast),
                    self.undrafted,
                )
            )
        if has_message():
            return
        self._passes.fork(self.prepared)
        if self._passes.draft(self.prepared, has_message) and not has_message():
            self.on_prepared()

    def prepared_proposals(self) -> tuple[PreparedProposal, ...]:
        """Return what has been prepared, for the coordinator to look up instead of asking.

        It is empty if some sequence will probably have to ask anyway, and until all branches are
        finished.
        """
        probability = self._hit_rate ** len(self._branches.prepared)
        is_worth_it = probability >= MIN_ALL_HIT_PROBABILITY and self._branches.are_finished
        return self._branches.proposals if is_worth_it else ()

    def release(self, seq_ids: Sequence[int]) -> None:
        self.drop(seq_ids)
        self._drafter.release(seq_ids)

    def drop(self, seq_ids: Sequence[int]) -> None:
        """Prepare no further for sequences, which the caller releases."""
        for steps in (self._postponed, self.answered, self.undrafted):
            steps[:] = [step for step in steps if step.seq_id not in seq_ids]
        self._branches.discard(seq_ids)

    def begin(self, steps: Sequence[DraftStep], deadline: float) -> DraftingRound:
        """Take a message: promote the branches that its steps match, and choose what to draft."""
        if (busy_fraction := self._idle.end()) is not None:
            self._passes.budget.adapt(busy_fraction)
        self.is_due, self.answered = True, []
        # What there was no time for, before the message builds on it.
        late, self.undrafted = self.undrafted, []
        self._prefill([*self.take_postponed(), *(replace(step, gamma=0) for step in late)])
        ready = {step.seq_id: self._promote_match(step) for step in steps}
        wanted = [step for step in steps if step.gamma]
        if deadline == math.inf or (
            self._clock() < deadline and not all(ready[step.seq_id] for step in wanted)
        ):
            drafting = wanted
        else:
            drafting = [
                replace(step, gamma=min(step.gamma, depth))
                for step in wanted
                if (depth := ready[step.seq_id])
            ]
            self.undrafted = [step for step in wanted if not ready[step.seq_id]]
        self._postponed = [step for step in steps if not step.gamma]
        return DraftingRound(tuple(steps), drafting, deadline, ready)

    def end(self, asked: DraftingRound) -> None:
        """Remember what is answered, to prepare what follows it."""
        self.answered += [
            step
            for step in asked.drafting
            if (found := asked.proposals.get(step.seq_id)) is not None and found.tokens
        ]
        if self.num_unforecast:
            self._idle.begin()

    def take_postponed(self) -> list[DraftStep]:
        """Return the steps that only fill the cache, for the caller to run."""
        postponed, self._postponed = self._postponed, []
        return postponed

    def settle(self) -> None:
        """Discard what was prepared before the last message, and learn from what came true."""
        if self.is_due:
            self.discard_branches()
        self.is_due = False
        self._fanout.observe(self._outcomes)
        self._outcomes = []

    @property
    def has_work(self) -> bool:
        """True if there is something to forecast or to draft for."""
        return bool(self.num_unforecast) or not self._branches.are_finished

    @property
    def num_unforecast(self) -> int:
        """Number of sequences whose outcomes are to be forecast."""
        return len(self.answered) + len(self.undrafted)

    @property
    def prepared(self) -> list[PreparedBranches]:
        """The forecasts, with the branches that are forked for them."""
        return list(self._branches.prepared.values())

    def add_forecasts(self, forecasts: Sequence[OutcomeForecast]) -> None:
        """Take the forecasts for all that was answered."""
        steps = {step.seq_id: step for step in (*self.answered, *self.undrafted)}
        self.answered, self.undrafted = [], []
        self._branches.add(
            PreparedBranches(forecast, steps[forecast.seq_id]) for forecast in forecasts
        )

    def discard_branches(self) -> None:
        """Discard all that is prepared, also for sequences that were not in the last message."""
        self._branches.discard(list(self._branches.prepared))

    def on_prepared(self) -> None:
        """Note that all is prepared."""
        self._idle.on_prepared()

    def _promote_match(self, step: DraftStep) -> int | None:
        """Replace the sequence by the branch that matches the step.

        Returns the draft tokens of the branch, 0 if there is none, and None if no outcome of the
        sequence was forecast.
        """
        found = self._branches.match(step)
        if found is None:
            return None
        outcome, branch = found
        self._outcomes.append(outcome)
        self._hit_rate += HIT_RATE_WEIGHT * ((branch is not None) - self._hit_rate)
        if branch is None:
            self.num_misses += 1
            return 0
        self._drafter.promote_branch(step.seq_id, branch.seq_id)
        self.num_hits += 1
        return len(branch.tokens)

    def _prefill(self, steps: Sequence[DraftStep]) -> None:
        if steps:
            self._drafter.draft(steps, never)
