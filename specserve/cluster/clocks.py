"""A worker's clock in terms of our own, from the times of messages and their answers. Hosts' clocks share no zero and drift apart slowly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specserve.types import Span

_AGEING = 1e-3  # of the best exchange's doubt, an exchange: an old one gives way to a newer that is nearly as good


class Alignment:
    """The offset of the exchange that left the least doubt: what was not spent at the worker was spent on the way, there or back."""

    def __init__(self) -> None:
        self.offset = 0.0  # to be added to the worker's times
        self._doubt = float("inf")

    def aligned(self, spans: Sequence[Span], *, sent: float, answered: float) -> tuple[Span, ...]:
        """By our clock. The last of the spans lies between our sending the message and having its answer."""
        if not spans:
            return ()
        work = spans[-1]
        doubt = max(0.0, (answered - sent) - (work.ended - work.begun)) / 2
        self._doubt *= 1 + _AGEING
        if doubt <= self._doubt:
            offset = (sent + answered) / 2 - (work.begun + work.ended) / 2
            self.offset = 0.0 if abs(offset) <= doubt else offset  # on one host it is one clock
            self._doubt = doubt
        return (
            tuple(spans)
            if not self.offset
            else tuple(
                replace(s, begun=s.begun + self.offset, ended=s.ended + self.offset) for s in spans
            )
        )
