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
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from specserve.drafters.base import ForkableDrafter, never
from specserve.drafters.branch_budget import BranchBudget
from specserve.drafters.branch_set import BranchSet
from specserve.drafters.branches import Fanout, ObservedOutcome
from specserve.drafters.drafting_rounds import DraftingRound, DraftingRounds
from specserve.drafters.prepared_branches import PreparedBranches
from specserve.types import DraftStep, PreparedProposal, Proposal

MIN_ALL_HIT_PROBABILITY = 0.25
"""Prepared proposals are sent in advance if all sequences hit with at least this probability.

The coordinator can skip the wait only if all of them do.
"""
HIT_RATE_WEIGHT = 0.1
"""Weight of the newest hit or miss in their running mean."""


class Anticipation:
    """A drafter that works between two messages: call `prepare` after every answer.

    Releases are postponed, too, until they delay no answer. With `group_of`, each message is about
    the sequences of some groups; what is prepared for those of the others is kept, and what such a
    message interrupted goes on after its answer, in the same passes as its own branches.
    """

    def __init__(
        self,
        drafter: ForkableDrafter,
        fanout: Fanout,
        *,
        clock: Callable[[], float],
        group_of: Callable[[int], int] = lambda seq_id: 0,
    ) -> None:
        self._drafter, self._fanout, self._clock = drafter, fanout, clock
        self._group_of = group_of
        self._due: set[int] = set()  # groups that were answered since the last preparation
        self._budget = BranchBudget(fanout)
        self._branches = BranchSet(drafter, fanout, self._budget, clock=clock, group_of=group_of)
        self._rounds = DraftingRounds(drafter, clock=clock, make_room=self._branches.release)
        self._answered: list[DraftStep] = []  # in the last answer, with draft tokens
        self._postponed: list[DraftStep] = []  # steps that only fill the cache
        self._undrafted: list[DraftStep] = []  # steps whose drafts would have come too late
        self._outcomes: list[ObservedOutcome] = []  # that the fan-out has yet to learn from
        self.num_hits = self.num_misses = 0
        self._hit_rate = 0.0

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """Return one proposal for each step; past the deadline they are shorter."""
        asked = self.begin(steps, deadline)
        while asked not in self.advance(never):
            pass
        return asked.answer()

    def begin(self, steps: Sequence[DraftStep], deadline: float) -> DraftingRound:
        """Take a message; `advance` drafts for it, and for all that were taken before.

        It replaces one of the same groups that is not answered yet. Prepared proposals that are
        shorter than wanted grow only where there is no deadline, or while others are drafted for.
        A step that would be drafted for past the deadline, or with gamma 0, gets no draft tokens
        and is prefilled afterwards.
        """
        groups = self._groups(step.seq_id for step in steps) or {0}
        self._rounds.drop(lambda seq_id: self._group_of(seq_id) in groups)
        self._budget.on_message(groups, self._clock())
        self._due |= groups
        self._answered = self._others(self._answered, groups)
        self._prefill_postponed(groups)
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
            self._undrafted += [step for step in wanted if not ready[step.seq_id]]
        self._postponed += [step for step in steps if not step.gamma]
        new = DraftingRound(tuple(steps), drafting, deadline, ready)
        if all((ready[step.seq_id] or 0) >= step.gamma for step in drafting):
            # No pass is needed, and none that is for others is waited for.
            found = self._drafter.draft(drafting, never)
            new.proposals.update((proposal.seq_id, proposal) for proposal in found)
        return self._rounds.add(new)

    def advance(self, should_stop: Callable[[], bool]) -> list[DraftingRound]:
        """Draft for the messages under way, and return those that can be answered.

        It returns when there is one, or once `should_stop`, which is called between passes.
        Unfinished branches of other groups get draft tokens in the same passes.
        """
        self._branches.fork(self._due)  # of forecasts that a message of others has interrupted
        riders = self._branches.riders(self._due, num_passes=self._rounds.num_passes)
        done, found = self._rounds.advance(should_stop, riders.steps)
        riders.keep(found)
        for each in done:
            self._end(each)
        return done

    def prepare(self, has_message: Callable[[], bool]) -> None:
        """Prepare the next proposals until nothing is left to do or a message arrives.

        `has_message` is called between passes.
        """
        if not self.fork(has_message):
            return
        if self._branches.draft(has_message) and not has_message():
            self._budget.on_prepared(self._clock())

    def fork(self, has_message: Callable[[], bool] = never) -> bool:
        """Fork branches for likely outcomes of what was answered; they are not drafted for yet.

        Returns False if there is nothing to draft for, or a message arrives before.
        """
        self._prefill(self._postponed)
        self._postponed = []
        due, self._due = self._due, set()
        self._branches.release(due)
        self._fanout.observe(self._outcomes)
        self._outcomes = []
        if self._branches.are_finished() and not self._answered and not self._undrafted:
            self._budget.on_prepared(self._clock())
            return False
        if has_message():
            return False
        self._forecast()
        if has_message():
            return False
        self._branches.fork()
        return True

    def prepared_proposals(self, group: int = 0) -> tuple[PreparedProposal, ...]:
        """Return what has been prepared, for the coordinator to look up instead of asking.

        It is empty if some sequence of the group will probably have to ask anyway, and until all
        of its branches are finished.
        """
        num_sequences = self._branches.num_sequences(group)
        if self._hit_rate**num_sequences < MIN_ALL_HIT_PROBABILITY:
            return ()
        return self._branches.proposals(group) if self._branches.are_finished(group) else ()

    def release(self, seq_ids: Sequence[int]) -> None:
        self._postponed = [step for step in self._postponed if step.seq_id not in seq_ids]
        self._answered = [step for step in self._answered if step.seq_id not in seq_ids]
        self._undrafted = [step for step in self._undrafted if step.seq_id not in seq_ids]
        self._rounds.drop(lambda seq_id: seq_id in seq_ids)
        for seq_id in seq_ids:
            self._branches.discard(self._branches.pop(seq_id))
        self._drafter.release(seq_ids)

    def _promote_match(self, step: DraftStep) -> int | None:
        """Replace the sequence by the branch that matches the step.

        Returns the draft tokens of the branch, 0 if there is none, and None if no outcome of the
        sequence was forecast.
        """
        prepared = self._branches.pop(step.seq_id)
        outcome = None if prepared is None else prepared.infer_outcome(step)
        if prepared is None or outcome is None:
            self._branches.discard(prepared)
            return None
        self._outcomes.append(ObservedOutcome(prepared.forecast, *outcome))
        branch = prepared.branches.pop(outcome, None)
        if branch is not None:
            prepared.drop(branch.seq_id)
        self._hit_rate += HIT_RATE_WEIGHT * ((branch is not None) - self._hit_rate)
        self._branches.discard(prepared)
        if branch is None:
            self.num_misses += 1
            return 0
        self._drafter.promote_branch(step.seq_id, branch.seq_id)
        self.num_hits += 1
        return len(branch.tokens)

    def _end(self, done: DraftingRound) -> None:
        """Remember what is answered, to prepare what follows it."""
        self._answered += [
            step
            for step in done.drafting
            if (found := done.proposals.get(step.seq_id)) is not None and found.tokens
        ]
        known = self._groups(step.seq_id for step in (*self._answered, *self._undrafted))
        self._budget.on_answer(
            known & self._groups(step.seq_id for step in done.steps), self._clock()
        )

    def _forecast(self) -> None:
        """Forecast the outcomes of what was answered."""
        steps = {step.seq_id: step for step in (*self._answered, *self._undrafted)}
        if not steps:
            return
        messages = self._rounds.carried()
        forecasts = self._drafter.forecast_outcomes(
            [step.seq_id for step in self._answered],
            self._budget.width(len(steps), len(self._groups(steps))),
            self._undrafted,
            [*messages, *self._branches.unfinished(are_awaited=bool(messages))],
        )
        self._answered, self._undrafted = [], []
        self._branches.add(
            PreparedBranches(forecast, steps[forecast.seq_id]) for forecast in forecasts
        )

    def _groups(self, seq_ids: Iterable[int]) -> set[int]:
        return {self._group_of(seq_id) for seq_id in seq_ids}

    def _prefill_postponed(self, groups: AbstractSet[int]) -> None:
        """Prefill what there was no time for, before a message of these groups builds on it."""
        waiting = [*self._postponed, *(replace(step, gamma=0) for step in self._undrafted)]
        self._prefill([step for step in waiting if self._group_of(step.seq_id) in groups])
        self._postponed = self._others(self._postponed, groups)
        self._undrafted = self._others(self._undrafted, groups)

    def _others(self, steps: Sequence[DraftStep], groups: AbstractSet[int]) -> list[DraftStep]:
        """Return the steps of other groups than these."""
        return [step for step in steps if self._group_of(step.seq_id) not in groups]

    def _prefill(self, steps: Sequence[DraftStep]) -> None:
        if steps:
            self._drafter.draft(steps, never)
