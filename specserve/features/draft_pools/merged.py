"""The anticipation of several engines, whose passes are made in one. Knows no links and no tensors.

Each engine has an `Anticipation` of its own, over one drafter. A message of one leaves what is
prepared for the others; what it interrupts goes on after its answer, in the passes of its branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specserve.drafters.anticipation import Anticipation
from specserve.drafters.base import ForkableDrafter, never
from specserve.drafters.branch_passes import BranchPasses
from specserve.drafters.branches import Fanout
from specserve.drafters.drafting_round import DraftingRound
from specserve.drafters.prepared_branches import PreparedBranches, UnfinishedBranches
from specserve.features.draft_pools.rounds import DraftingRounds
from specserve.features.draft_pools.shares import engine_of
from specserve.types import DraftStep, PreparedProposal


class MergedAnticipation:
    """A drafter for several engines; without a fan-out it prepares nothing."""

    def __init__(
        self, drafter: ForkableDrafter, fanout: Fanout | None, *, clock: Callable[[], float]
    ) -> None:
        self._drafter, self._fanout, self._clock = drafter, fanout, clock
        self._passes = None if fanout is None else BranchPasses(drafter, fanout, clock=clock)
        self.engines: dict[int, Anticipation] = {}
        self._rounds = DraftingRounds(drafter, clock=clock, make_room=self._make_room)

    def begin(self, engine: int, steps: Sequence[DraftStep], deadline: float) -> DraftingRound:
        """Take a message; `advance` drafts for it, and for all that were taken before.

        It replaces one of the same engine that is not answered yet. Prepared proposals that are
        shorter than wanted grow while others are drafted for, too.
        """
        self._rounds.drop(lambda seq_id: engine_of(seq_id) == engine)
        if self._passes is None:
            return self._rounds.begin(steps, deadline)
        asked = self._of(engine, self._passes).begin(steps, deadline)
        if all((asked.num_ready[step.seq_id] or 0) >= step.gamma for step in asked.drafting):
            # No pass is needed, and none that is for others is waited for.
            asked.add(self._drafter.draft(asked.drafting, never))
        return self._rounds.add(asked)

    def advance(self, should_stop: Callable[[], bool]) -> list[DraftingRound]:
        """Draft for the messages under way, and return those that can be answered.

        It returns when there is one, or once `should_stop`, which is called between passes.
        Unfinished branches of other engines get draft tokens in the same passes.
        """
        if self._passes is None:
            return self._rounds.advance(should_stop)[0]
        others = [each.prepared for each in self.engines.values() if not each.is_due]
        self._passes.fork(*others)  # for forecasts that a message of others has interrupted
        num_passes = self._rounds.num_passes
        unfinished = UnfinishedBranches(
            [one for each in others for one in each] if num_passes else [],
            num_passes=num_passes,
            limit=self._passes.budget.max_extra_steps,
        )
        done, found = self._rounds.advance(should_stop, unfinished.steps)
        unfinished.keep(found)
        for asked in done:
            for engine in {engine_of(step.seq_id) for step in asked.steps} & self.engines.keys():
                self.engines[engine].end(asked)
        return done

    def prepare(self, has_message: Callable[[], bool]) -> None:
        """Prepare the next proposals until nothing is left to do or a message arrives.

        `has_message` is called between passes.
        """
        if self._passes is None or not self.fork(has_message):
            return
        if self._passes.draft(self._prepared, has_message) and not has_message():
            self._on_prepared()

    def fork(self, has_message: Callable[[], bool] = never) -> bool:
        """Fork branches for likely outcomes of what was answered; they are not drafted for yet.

        Returns False if there is nothing to draft for, or a message arrives before.
        """
        if self._passes is None:
            return False
        engines = self.engines.values()
        if postponed := [step for each in engines for step in each.take_postponed()]:
            self._drafter.draft(postponed, never)
        for each in engines:
            each.settle()
        self._passes.release_discarded()
        if not any(each.has_work for each in engines):
            self._on_prepared()
            return False
        if has_message():
            return False
        self._forecast(self._passes)
        if has_message():
            return False
        self._passes.fork(*(each.prepared for each in engines))
        return True

    def prepared_proposals(self, engine: int) -> tuple[PreparedProposal, ...]:
        """Return what has been prepared for an engine."""
        known = self.engines.get(engine)
        return () if known is None else known.prepared_proposals()

    def release(self, seq_ids: Sequence[int]) -> None:
        """Release sequences of any engines."""
        self._rounds.drop(lambda seq_id: seq_id in seq_ids)
        for engine in {engine_of(seq_id) for seq_id in seq_ids} & self.engines.keys():
            self.engines[engine].drop(seq_ids)
        self._drafter.release(seq_ids)

    def remove_engine(self, engine: int) -> None:
        """Drop an engine all of whose sequences are released."""
        self.engines.pop(engine, None)

    def _of(self, engine: int, passes: BranchPasses) -> Anticipation:
        if engine not in self.engines:
            assert self._fanout is not None
            self.engines[engine] = Anticipation(
                self._drafter, self._fanout, clock=self._clock, passes=passes
            )
        return self.engines[engine]

    def _forecast(self, passes: BranchPasses) -> None:
        """Forecast the outcomes of what was answered, in a pass that takes others along."""
        new = {number: each for number, each in self.engines.items() if each.num_unforecast}
        if not new:
            return
        messages = self._rounds.include_in_pass()
        limit = passes.budget.max_extra_steps if messages else None
        forecasts = self._drafter.forecast_outcomes(
            [step.seq_id for each in new.values() for step in each.answered],
            max(passes.budget.width(each.num_unforecast) for each in new.values()),
            [step for each in new.values() for step in each.undrafted],
            [*messages, *UnfinishedBranches(self._prepared, limit=limit).steps],
        )
        for number, each in new.items():
            each.add_forecasts([one for one in forecasts if engine_of(one.seq_id) == number])

    @property
    def _prepared(self) -> list[PreparedBranches]:
        return [one for each in self.engines.values() for one in each.prepared]

    def _on_prepared(self) -> None:
        for each in self.engines.values():
            each.on_prepared()

    def _make_room(self) -> bool:
        """Release all branches; return False if there were none."""
        if self._passes is None:
            return False
        for each in self.engines.values():
            each.discard_branches()
        return self._passes.release_discarded()
