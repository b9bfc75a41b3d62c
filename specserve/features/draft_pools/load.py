"""Load of a draft that several engines share: the time that it would draft, if it prepared nothing.

Knows proposals and seconds. Proposals that were prepared in idle time cost nothing when they are
requested, so the time spent on rounds alone would fall as soon as a pool has grown, and it would
shrink again. This measure is the same whether a round's draft tokens were prepared or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve.types import Proposal

MEAN_WEIGHT = 0.1
"""Weight of the newest answers in the mean wait for answers of which nothing was prepared."""


class DraftLoad:
    """Seconds of drafting, with those that prepared proposals have saved."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._mean_s: float | None = None  # wait for answers of which nothing was prepared

    def record(self, seconds: float, proposals: Sequence[Proposal], *, waited_s: float) -> None:
        """Count the drafting since the last answers, and proposals that were waited for so long."""
        drafted = [proposal for proposal in proposals if proposal.tokens]
        if any(proposal.anticipated for proposal in drafted):
            self.seconds += max(seconds, self._mean_s or 0.0)
            return
        self.seconds += seconds
        if drafted:
            mean = waited_s if self._mean_s is None else self._mean_s
            self._mean_s = mean + MEAN_WEIGHT * (waited_s - mean)
