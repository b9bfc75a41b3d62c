"""The state behind one prepared proposal: a forecast of outcomes, and branches drafted for them.

Knows no drafter and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specserve.drafters.base import OutcomeForecast
from specserve.drafters.branches import Branch
from specserve.types import DraftStep, Proposal


@dataclass(slots=True)
class PreparedBranches:
    """The forecast for the proposal of a step, and the branches drafted for its outcomes."""

    forecast: OutcomeForecast
    step: DraftStep
    branches: dict[tuple[int, int], Proposal] = field(default_factory=dict)
    """(accepted, next token) to the branch's proposal, under the branch's own id."""
    unfinished: dict[int, tuple[Branch, DraftStep]] | None = None
    """Branches to draft for by their ids, and the steps that do it. None: none are forked yet."""

    @property
    def is_finished(self) -> bool:
        return self.unfinished is not None and not self.unfinished

    @property
    def branch_ids(self) -> set[int]:
        """Ids of the branches, those without draft tokens included."""
        return {
            *(proposal.seq_id for proposal in self.branches.values()),
            *(self.unfinished or ()),
        }

    def add(self, branch: Branch, branch_id: int) -> DraftStep:
        """Add a branch to draft for, and return the step that does it."""
        assert self.unfinished is not None
        start = self.forecast.start + branch.accepted
        step = DraftStep(branch_id, start, (branch.token,), self.step.gamma, self.step.policy)
        self.unfinished[branch_id] = branch, step
        return step

    def keep(self, branch: Branch, proposal: Proposal) -> int:
        """Keep what was drafted for a branch, and return by how many tokens it has grown."""
        outcome = branch.accepted, branch.token
        before = self.branches.get(outcome)
        if proposal.tokens:
            self.branches[outcome] = proposal
        return len(proposal.tokens) - (0 if before is None else len(before.tokens))

    def drop(self, branch_id: int) -> None:
        """Draft no further for a branch."""
        if self.unfinished:
            self.unfinished.pop(branch_id, None)

    def infer_outcome(self, step: DraftStep) -> tuple[int, int] | None:
        """Return (accepted, next token) as the following step implies it.

        Returns None if the step continues another text.
        """
        drafts, start = self.forecast.drafts, self.forecast.start
        accepted = step.stop - start - 1
        if not 0 <= accepted <= len(drafts) or step.start > start + accepted:
            return None
        if step.start >= start and step.tokens[:-1] != drafts[step.start - start : accepted]:
            return None
        return accepted, step.tokens[-1]
