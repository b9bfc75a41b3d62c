"""The passes over branches, whosever they are: forked for forecast outcomes, and drafted for.

Knows no messages, and no clock but the one it is given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from specserve.drafters.base import ForkableDrafter
from specserve.drafters.branch_budget import BranchBudget
from specserve.drafters.branches import Fanout
from specserve.drafters.prepared_branches import PreparedBranches, UnfinishedBranches

FIRST_BRANCH_ID = 2**61
"""Ids of branches start here; no request ever has one."""


class BranchPasses:
    """Forks and passes of a drafter's branches. Those that are of no use are released together."""

    def __init__(
        self, drafter: ForkableDrafter, fanout: Fanout, *, clock: Callable[[], float]
    ) -> None:
        self._drafter, self._fanout, self._clock = drafter, fanout, clock
        self.budget = BranchBudget(fanout)
        self._ids = itertools.count(FIRST_BRANCH_ID)
        self._discarded: list[int] = []

    def discard(self, branch_ids: Iterable[int]) -> None:
        """Mark branches as being of no use."""
        self._discarded += branch_ids

    def release_discarded(self) -> bool:
        """Release the branches that are of no use; return False if there were none."""
        discarded, self._discarded = self._discarded, []
        self._drafter.release(discarded)
        return bool(discarded)

    def fork(self, *engines: Iterable[PreparedBranches]) -> None:
        """Fork the likeliest branches of forecasts that have none yet, while there is room.

        Branches of several engines are chosen together, as many as the budget has for each.
        """
        new = [[one for one in each if one.unfinished is None] for each in engines]
        owners = {one.forecast.seq_id: one for each in new for one in each}
        if not owners:
            return
        max_branches = self.budget.max_branches * sum(map(bool, new))
        branches = self._fanout.choose([one.forecast for one in owners.values()], max_branches)
        for prepared in owners.values():
            prepared.unfinished = {}
        for branch in branches:
            prepared, branch_id = owners[branch.seq_id], next(self._ids)
            step = prepared.add(branch, branch_id)
            if not self._drafter.fork(branch.seq_id, branch_id, step.start):
                prepared.drop(branch_id)
                break

    def draft(self, prepared: Iterable[PreparedBranches], has_message: Callable[[], bool]) -> bool:
        """Draft for all unfinished branches at once; return False if that was interrupted."""
        branches, was_stopped = UnfinishedBranches(prepared), False

        def should_stop() -> bool:
            nonlocal was_stopped
            was_stopped = was_stopped or has_message()
            return was_stopped

        start = self._clock()
        if branches.steps and (
            depth := branches.keep(self._drafter.draft(branches.steps, should_stop))
        ):
            self.budget.on_passes(len(branches.steps), (self._clock() - start) / depth)
        if not was_stopped:
            self.discard(branches.end())
        return not was_stopped
