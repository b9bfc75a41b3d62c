"""A clock for objects that take one, which stands still until a test sets it."""

from __future__ import annotations


class Clock:
    """Seconds that a test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
