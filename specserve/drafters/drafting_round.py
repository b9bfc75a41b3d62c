"""The steps of one message, and what has been drafted for them. Knows no drafter and no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specserve.types import DraftStep, Proposal


@dataclass(slots=True, eq=False)
class DraftingRound:
    """A message that is drafted for."""

    steps: tuple[DraftStep, ...]
    drafting: list[DraftStep]
    """Those to call the drafter with, by as many tokens as they are to get."""
    deadline: float
    num_ready: Mapping[int, int | None] = field(default_factory=dict)
    """Draft tokens that were prepared for a sequence; None: nothing was known to prepare for."""
    proposals: dict[int, Proposal] = field(default_factory=dict)

    def add(self, proposals: Sequence[Proposal]) -> None:
        """Add what was drafted, in place of what was before."""
        self.proposals.update((proposal.seq_id, proposal) for proposal in proposals)

    def answer(self) -> list[Proposal]:
        """Return one proposal for each step, in order."""
        found = [
            self.proposals.get(step.seq_id) or Proposal(step.seq_id, step.stop, (), None, step.stop)
            for step in self.steps
        ]
        return [
            replace(
                one,
                anticipated=None if (num := self.num_ready.get(one.seq_id)) is None else num > 0,
            )
            for one in found
        ]


def steps_without_room(
    steps: Sequence[DraftStep], proposals: Sequence[Proposal]
) -> list[DraftStep]:
    """Return the steps that got no draft token although they want some."""
    return [
        step
        for step, found in zip(steps, proposals, strict=True)
        if step.gamma and not found.tokens
    ]
