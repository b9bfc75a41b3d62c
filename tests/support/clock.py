"""Clocks for objects that take one: their time does not depend on the machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable


class Clock:
    """Seconds that a test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def counting_clock() -> Callable[[], float]:
    """Return a clock that counts how often it was read.

    What decides by such a clock decides the same in every run.
    """
    readings = itertools.count(1)
    return lambda: float(next(readings))
