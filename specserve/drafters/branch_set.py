"""The branches that are prepared for one engine. Knows no messages, no drafter and no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from specserve.drafters.branch_passes import BranchPasses
from specserve.drafters.branches import ObservedOutcome
from specserve.drafters.prepared_branches import PreparedBranches
from specserve.types import DraftStep, PreparedProposal, Proposal


class BranchSet:
    """Forecasts and their branches, by sequence."""

    def __init__(self, passes: BranchPasses) -> None:
        self._passes = passes
        self.prepared: dict[int, PreparedBranches] = {}  # by sequence

    def add(self, forecasts: Iterable[PreparedBranches]) -> None:
        """Add forecasts, which have no branches yet."""
        self.prepared |= {prepared.forecast.seq_id: prepared for prepared in forecasts}

    def match(self, step: DraftStep) -> tuple[ObservedOutcome, Proposal | None] | None:
        """Return the outcome that a step implies, and the branch drafted for it, if there is one.

        All else that is prepared for the sequence is discarded. Returns None if no outcome of the
        sequence was forecast.
        """
        prepared = self.prepared.get(step.seq_id)
        outcome = None if prepared is None else prepared.infer_outcome(step)
        branch = None
        if prepared is not None and outcome is not None:
            branch = prepared.branches.pop(outcome, None)
            if branch is not None:
                prepared.drop(branch.seq_id)
        self.discard([step.seq_id])
        if prepared is None or outcome is None:
            return None
        return ObservedOutcome(prepared.forecast, *outcome), branch

    def discard(self, seq_ids: Iterable[int]) -> None:
        """Discard what is prepared for sequences."""
        for seq_id in seq_ids:
            if (prepared := self.prepared.pop(seq_id, None)) is not None:
                self._passes.discard(prepared.branch_ids)

    @property
    def are_finished(self) -> bool:
        """True if there is nothing to draft for."""
        return all(each.is_finished for each in self.prepared.values())

    @property
    def proposals(self) -> tuple[PreparedProposal, ...]:
        return tuple(
            PreparedProposal(token, replace(proposal, seq_id=seq_id, anticipated=True))
            for seq_id, prepared in self.prepared.items()
            for (_, token), proposal in prepared.branches.items()
        )
