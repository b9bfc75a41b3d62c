"""Anticipation: prepare the next proposals for likely outcomes while the target verifies.

Knows no model, and no clock but the one it is given.

An outcome is how many draft tokens are accepted and which token comes next. For the likelier
outcomes the sequence is forked and drafted from, all branches in one pass a depth. The next step is
itself the key: it matches one branch, which then replaces the sequence, or none. A prepared
proposal is token for token the one that would be drafted later: anticipation changes only when it
is drafted. That of an EAGLE-3 head is not: it has only its own states to go on from (eagle.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from specserve.drafters.base import ForkableDrafter, never
from specserve.drafters.branch_budget import BranchBudget
from specserve.drafters.branches import Branch, Fanout, ObservedOutcome
from specserve.drafters.prepared_branches import PreparedBranches
from specserve.types import DraftStep, PreparedProposal, Proposal

FIRST_BRANCH_ID = 2**61
"""Ids of branches start here; no request ever has one."""
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
        self._ids = itertools.count(FIRST_BRANCH_ID)
        self._prepared: dict[int, PreparedBranches] = {}
        self._answered: list[DraftStep] = []  # in the last answer, with draft tokens
        self._postponed: list[DraftStep] = []  # steps that only fill the cache
        self._undrafted: list[DraftStep] = []  # steps whose drafts would have come too late
        self._stale: list[int] = []
        self._outcomes: list[ObservedOutcome] = []  # that the fan-out has yet to learn from
        self.num_hits = self.num_misses = 0
        self._hit_rate = 0.0

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """Return one proposal for each step; past the deadline they are shorter.

        Prepared proposals that are shorter than wanted grow only where there is no deadline, or
        while others are drafted for. A step that would be drafted for past the deadline, or with
        gamma 0, gets no draft tokens and is prefilled afterwards.
        """
        groups = self._groups(step.seq_id for step in steps) or {0}
        self._budget.on_message(groups, self._clock())
        self._due |= groups
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
        proposals = self._draft(drafting, lambda: self._clock() > deadline)
        self._answered = self._others(self._answered, groups) + [
            step for step in wanted if step.seq_id in proposals and proposals[step.seq_id].tokens
        ]
        self._postponed += [step for step in steps if not step.gamma]
        answered = self._groups(step.seq_id for step in (*self._answered, *self._undrafted))
        self._budget.on_answer(answered & groups, self._clock())
        return [
            replace(
                proposals.get(step.seq_id) or Proposal(step.seq_id, step.stop, (), None, step.stop),
                anticipated=None if (depth := ready[step.seq_id]) is None else depth > 0,
            )
            for step in steps
        ]

    def prepare(self, has_message: Callable[[], bool]) -> None:
        """Prepare the next proposals until nothing is left to do or a message arrives.

        `has_message` is called between passes.
        """
        self._prefill(self._postponed)
        self._postponed = []
        due, self._due = self._due, set()
        self._release_branches(due)
        self._fanout.observe(self._outcomes)
        self._outcomes = []
        is_finished = all(prepared.is_finished for prepared in self._prepared.values())
        if has_message() or (is_finished and not self._answered and not self._undrafted):
            return
        self._forecast()
        if has_message():
            return
        self._fork_branches()
        if self._draft_branches(has_message) and not has_message():
            self._budget.on_prepared(self._clock())

    def prepared_proposals(self, group: int = 0) -> tuple[PreparedProposal, ...]:
        """Return what has been prepared, for the coordinator to look up instead of asking.

        It is empty if some sequence of the group will probably have to ask anyway, and until all
        of its branches are finished.
        """
        of_group = {
            seq_id: prepared
            for seq_id, prepared in self._prepared.items()
            if self._group_of(seq_id) == group
        }
        if not all(prepared.is_finished for prepared in of_group.values()):
            return ()
        if self._hit_rate ** len(of_group) < MIN_ALL_HIT_PROBABILITY:
            return ()
        return tuple(
            PreparedProposal(token, replace(proposal, seq_id=seq_id, anticipated=True))
            for seq_id, prepared in of_group.items()
            for (_, token), proposal in prepared.branches.items()
        )

    def release(self, seq_ids: Sequence[int]) -> None:
        self._postponed = [step for step in self._postponed if step.seq_id not in seq_ids]
        self._answered = [step for step in self._answered if step.seq_id not in seq_ids]
        self._undrafted = [step for step in self._undrafted if step.seq_id not in seq_ids]
        for seq_id in seq_ids:
            self._discard(self._prepared.pop(seq_id, None))
        self._drafter.release(seq_ids)

    def _promote_match(self, step: DraftStep) -> int | None:
        """Replace the sequence by the branch that matches the step.

        Returns the draft tokens of the branch, 0 if there is none, and None if no outcome of the
        sequence was forecast.
        """
        prepared = self._prepared.pop(step.seq_id, None)
        outcome = None if prepared is None else prepared.infer_outcome(step)
        if prepared is None or outcome is None:
            self._discard(prepared)
            return None
        self._outcomes.append(ObservedOutcome(prepared.forecast, *outcome))
        branch = prepared.branches.pop(outcome, None)
        if branch is not None:
            prepared.drop(branch.seq_id)
        self._hit_rate += HIT_RATE_WEIGHT * ((branch is not None) - self._hit_rate)
        self._discard(prepared)
        if branch is None:
            self.num_misses += 1
            return 0
        self._drafter.promote_branch(step.seq_id, branch.seq_id)
        self.num_hits += 1
        return len(branch.tokens)

    def _draft(
        self, steps: Sequence[DraftStep], should_stop: Callable[[], bool]
    ) -> dict[int, Proposal]:
        """Draft for the steps; those that lack room are retried after releasing all branches."""
        proposals = {
            proposal.seq_id: proposal for proposal in self._drafter.draft(steps, should_stop)
        }
        lacking = [step for step in steps if not proposals[step.seq_id].tokens]
        if lacking and (self._stale or self._prepared):
            self._release_branches()
            proposals |= {
                proposal.seq_id: proposal for proposal in self._drafter.draft(lacking, should_stop)
            }
        return proposals

    def _forecast(self) -> None:
        """Forecast the outcomes of what was answered."""
        steps = {step.seq_id: step for step in (*self._answered, *self._undrafted)}
        if not steps:
            return
        forecasts = self._drafter.forecast_outcomes(
            [step.seq_id for step in self._answered],
            self._budget.width(len(steps), len(self._groups(steps))),
            self._undrafted,
        )
        self._answered, self._undrafted = [], []
        self._prepared |= {
            forecast.seq_id: PreparedBranches(forecast, steps[forecast.seq_id])
            for forecast in forecasts
        }

    def _fork_branches(self) -> None:
        """Fork branches for the forecasts that have none yet, as far as there is room."""
        new = [prepared for prepared in self._prepared.values() if prepared.unfinished is None]
        if not new:
            return
        num_groups = len(self._groups(prepared.forecast.seq_id for prepared in new))
        branches = self._fanout.choose(
            [prepared.forecast for prepared in new], self._budget.max_branches * num_groups
        )
        for prepared in new:
            prepared.unfinished = {}
        for branch in branches:
            prepared, branch_id = self._prepared[branch.seq_id], next(self._ids)
            step = prepared.add(branch, branch_id)
            if not self._drafter.fork(branch.seq_id, branch_id, step.start):
                prepared.drop(branch_id)
                break

    def _draft_branches(self, has_message: Callable[[], bool]) -> bool:
        """Draft for all unfinished branches at once; return False if that was interrupted."""
        unfinished: dict[int, tuple[Branch, DraftStep]] = {}
        for prepared in self._prepared.values():
            unfinished |= prepared.unfinished or {}
        was_stopped = False

        def should_stop() -> bool:
            nonlocal was_stopped
            was_stopped = was_stopped or has_message()
            return was_stopped

        start, depth = self._clock(), 0
        for proposal in (
            self._drafter.draft([step for _, step in unfinished.values()], should_stop)
            if unfinished
            else ()
        ):
            branch, _ = unfinished[proposal.seq_id]
            prepared = self._prepared[branch.seq_id]
            depth = max(depth, prepared.keep(branch, proposal))
            if not was_stopped:
                prepared.drop(proposal.seq_id)
                self._stale += [] if proposal.tokens else [proposal.seq_id]
        if depth:
            self._budget.on_passes(len(unfinished), (self._clock() - start) / depth)
        return not was_stopped

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

    def _discard(self, prepared: PreparedBranches | None) -> None:
        if prepared is not None:
            self._stale += prepared.branch_ids

    def _release_branches(self, groups: AbstractSet[int] | None = None) -> None:
        """Release all branches, or those of these groups.

        It includes those of sequences that were not in the last round.
        """
        for seq_id in list(self._prepared):
            if groups is None or self._group_of(seq_id) in groups:
                self._discard(self._prepared.pop(seq_id))
        stale, self._stale = self._stale, []
        self._drafter.release(stale)
