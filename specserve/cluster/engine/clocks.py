"""Align a worker's clock with the coordinator's, from the times of messages and their answers.

The clocks of different hosts share no zero and drift apart slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specserve.types import Span

UNCERTAINTY_GROWTH = 1e-3
"""Relative growth, per exchange, of the best exchange's uncertainty.

A newer exchange that is nearly as good thus replaces an old one.
"""


class ClockAlignment:
    """Clock offset taken from the exchange with the least uncertainty.

    The time that the worker did not spend went into the two transfers, in unknown parts; half of it
    is the uncertainty of the offset.
    """

    def __init__(self) -> None:
        self.offset = 0.0  # added to the worker's times
        self._uncertainty = float("inf")

    def align(self, spans: Sequence[Span], *, sent: float, answered: float) -> tuple[Span, ...]:
        """Return the spans by the coordinator's clock.

        The last of them lies between sending the message and receiving its answer.
        """
        if not spans:
            return ()
        work = spans[-1]
        uncertainty = max(0.0, (answered - sent) - (work.end - work.start)) / 2
        self._uncertainty *= 1 + UNCERTAINTY_GROWTH
        if uncertainty <= self._uncertainty:
            offset = (sent + answered) / 2 - (work.start + work.end) / 2
            self.offset = 0.0 if abs(offset) <= uncertainty else offset  # one host has one clock
            self._uncertainty = uncertainty
        return (
            tuple(spans)
            if not self.offset
            else tuple(
                replace(s, start=s.start + self.offset, end=s.end + self.offset) for s in spans
            )
        )
