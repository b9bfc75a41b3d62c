"""Progress of a draft that learns from served texts, as workers report it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LearningProgress:
    """Steps, swaps and acceptance so far."""

    steps: int = 0
    swaps: int = 0  # of the draft's weights, those that were rolled back included
    rollbacks: int = 0
    acceptance_before: float | None = None  # of the draft tokens verified before the latest swap
    acceptance: float | None = None  # of those verified since, the latest
