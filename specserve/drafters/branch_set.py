"""The branches of all sequences: forked for forecast outcomes, drafted for, and released.

Knows no messages, and no clock but the one it is given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace

from specserve.drafters.base import ForkableDrafter
from specserve.drafters.branch_budget import BranchBudget
from specserve.drafters.branches import Fanout
from specserve.drafters.prepared_branches import PreparedBranches, UnfinishedBranches
from specserve.types import DraftStep, PreparedProposal

FIRST_BRANCH_ID = 2**61
"""Ids of branches start here; no request ever has one."""


class BranchSet:
    """All that is prepared, by sequence. Branches that are of no use are released together."""

    def __init__(
        self,
        drafter: ForkableDrafter,
        fanout: Fanout,
        budget: BranchBudget,
        *,
        clock: Callable[[], float],
        group_of: Callable[[int], int],
    ) -> None:
        self._drafter, self._fanout, self._budget = drafter, fanout, budget
        self._clock, self._group_of = clock, group_of
        self._ids = itertools.count(FIRST_BRANCH_ID)
        self.prepared: dict[int, PreparedBranches] = {}  # by sequence
        self._stale: list[int] = []

    def add(self, forecasts: Iterable[PreparedBranches]) -> None:
        """Add forecasts, which have no branches yet."""
        self.prepared |= {prepared.forecast.seq_id: prepared for prepared in forecasts}

    def pop(self, seq_id: int) -> PreparedBranches | None:
        """Remove what is prepared for a sequence; `discard` releases its branches."""
        return self.prepared.pop(seq_id, None)

    def discard(self, prepared: PreparedBranches | None) -> None:
        if prepared is not None:
            self._stale += prepared.branch_ids

    def release(self, groups: AbstractSet[int] | None = None) -> bool:
        """Release all branches, or those of these groups; return False if there were none.

        It includes those of sequences that were not in the last round.
        """
        for seq_id in list(self.prepared):
            if groups is None or self._group_of(seq_id) in groups:
                self.discard(self.pop(seq_id))
        stale, self._stale = self._stale, []
        self._drafter.release(stale)
        return bool(stale)

    def num_sequences(self, group: int) -> int:
        """Return for how many sequences of a group something is prepared."""
        return len(self._of_group(group))

    def are_finished(self, group: int | None = None) -> bool:
        """Return whether there is nothing to draft for, in a group or at all."""
        prepared = self.prepared if group is None else self._of_group(group)
        return all(each.is_finished for each in prepared.values())

    def proposals(self, group: int) -> tuple[PreparedProposal, ...]:
        """Return what is prepared for the sequences of a group."""
        return tuple(
            PreparedProposal(token, replace(proposal, seq_id=seq_id, anticipated=True))
            for seq_id, prepared in self._of_group(group).items()
            for (_, token), proposal in prepared.branches.items()
        )

    def fork(self, excepted: AbstractSet[int] = frozenset()) -> None:
        """Fork branches for forecasts that have none yet, as far as there is room.

        Those of the excepted groups are left alone.
        """
        new = [
            prepared
            for seq_id, prepared in self.prepared.items()
            if prepared.unfinished is None and self._group_of(seq_id) not in excepted
        ]
        if not new:
            return
        num_groups = len({self._group_of(prepared.forecast.seq_id) for prepared in new})
        branches = self._fanout.choose(
            [prepared.forecast for prepared in new], self._budget.max_branches * num_groups
        )
        for prepared in new:
            prepared.unfinished = {}
        for branch in branches:
            prepared, branch_id = self.prepared[branch.seq_id], next(self._ids)
            step = prepared.add(branch, branch_id)
            if not self._drafter.fork(branch.seq_id, branch_id, step.start):
                prepared.drop(branch_id)
                break

    def draft(self, has_message: Callable[[], bool]) -> bool:
        """Draft for all unfinished branches at once; return False if that was interrupted."""
        branches, was_stopped = UnfinishedBranches(self.prepared.values()), False

        def should_stop() -> bool:
            nonlocal was_stopped
            was_stopped = was_stopped or has_message()
            return was_stopped

        start = self._clock()
        if branches.steps and (
            depth := branches.keep(self._drafter.draft(branches.steps, should_stop))
        ):
            self._budget.on_passes(len(branches.steps), (self._clock() - start) / depth)
        if not was_stopped:
            self._stale += branches.end()
        return not was_stopped

    def riders(self, excepted: AbstractSet[int], *, num_passes: int) -> UnfinishedBranches:
        """Return the branches to draft for in so many passes of messages, and by no more of them.

        Those of the excepted groups, whose messages these are, are left alone.
        """
        others = [
            prepared
            for seq_id, prepared in self.prepared.items()
            if num_passes and prepared.unfinished and self._group_of(seq_id) not in excepted
        ]
        return UnfinishedBranches(others, num_passes=num_passes, limit=self._budget.max_riders)

    def unfinished(self, *, are_awaited: bool) -> list[DraftStep]:
        """Return the steps of unfinished branches, few of them if messages are waited for."""
        limit = self._budget.max_riders if are_awaited else None
        return UnfinishedBranches(self.prepared.values(), limit=limit).steps

    def _of_group(self, group: int) -> dict[int, PreparedBranches]:
        return {
            seq_id: prepared
            for seq_id, prepared in self.prepared.items()
            if self._group_of(seq_id) == group
        }
