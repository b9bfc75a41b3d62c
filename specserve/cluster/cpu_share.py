"""Measure which share of a core this process uses. Knows no Ray and no requests."""

from __future__ import annotations

import time
from collections.abc import Callable


class CpuShare:
    """CPU time of this process, all its threads together, since the last reading."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._last = clock(), cpu_clock()

    def read(self) -> float:
        """Return the cores that were used since the last reading; 0 if no time has passed."""
        (then, used), self._last = self._last, (self._clock(), self._cpu_clock())
        now, now_used = self._last
        return (now_used - used) / (now - then) if now > then else 0.0
