"""Forecasts of outcomes, and the branches drafted for them: what prepared proposals are made of.

Knows no drafter and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

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

    def num_drafted(self, branch: Branch) -> int:
        """Return the number of draft tokens that a branch has."""
        found = self.branches.get((branch.accepted, branch.token))
        return 0 if found is None else len(found.tokens)

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


class UnfinishedBranches:
    """Branches of some forecasts that are drafted for in the same passes."""

    def __init__(
        self,
        prepared: Iterable[PreparedBranches],
        *,
        num_passes: int | None = None,
        limit: int | None = None,
    ) -> None:
        """Take at most `limit` branches, each with as many tokens as `num_passes` give it."""
        self._owners: dict[int, tuple[PreparedBranches, Branch]] = {}
        self.steps: list[DraftStep] = []
        for owner, branch, step in islice(_unfinished(prepared), limit):
            self._owners[step.seq_id] = owner, branch
            if num_passes is not None:
                gamma = min(step.gamma, owner.num_drafted(branch) + num_passes)
                step = replace(step, gamma=gamma)
            self.steps.append(step)

    def keep(self, proposals: Sequence[Proposal]) -> int:
        """Keep what was drafted, and return by how many tokens a branch has grown at most."""
        depth = 0
        for proposal in proposals:
            owner, branch = self._owners[proposal.seq_id]
            depth = max(depth, owner.keep(branch, proposal))
            if len(proposal.tokens) >= owner.step.gamma:
                owner.drop(proposal.seq_id)
        return depth

    def end(self) -> list[int]:
        """Draft no further for any, and return the ids of those without draft tokens."""
        for branch_id, (owner, _) in self._owners.items():
            owner.drop(branch_id)
        return [
            branch_id
            for branch_id, (owner, branch) in self._owners.items()
            if not owner.num_drafted(branch)
        ]


def _unfinished(
    prepared: Iterable[PreparedBranches],
) -> Iterator[tuple[PreparedBranches, Branch, DraftStep]]:
    for owner in prepared:
        for branch, step in (owner.unfinished or {}).values():
            yield owner, branch, step
