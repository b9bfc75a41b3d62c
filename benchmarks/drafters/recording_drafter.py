"""A drafter that keeps what it proposed on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specserve.types import Drafter, DraftStep, Proposal


@dataclass(slots=True)
class Noting:
    """Of rounds that asked for drafts, in order. No deadline: what is measured is what the drafter would say."""

    drafter: Drafter
    proposals: list[Proposal] = field(default_factory=list)

    async def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        proposals = await self.drafter.propose(steps, math.inf)
        self.proposals += [
            proposal for step, proposal in zip(steps, proposals, strict=True) if step.gamma
        ]
        return proposals

    async def release(self, seq_ids: Sequence[int]) -> None:
        await self.drafter.release(seq_ids)
