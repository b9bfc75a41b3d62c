"""Time that passes only where somebody waits: an event loop that jumps to the next timer instead of sleeping, and a device's own clock."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stalled(RuntimeError):
    """Nothing is scheduled, so nothing would ever happen again."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Single-threaded and without real files or signals, so the same program always runs in the same order."""

    def __init__(self) -> None:
        self._leaps = _Leaps()
        super().__init__(self._leaps)

    def time(self) -> float:
        return self._leaps.now


class DeviceClock:
    """Where a simulated device stands in time. It runs ahead of the loop's while a pass is under way."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy = 0.0  # seconds spent in passes

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, from 0 seconds on. Raises Stalled where that would wait for ever."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class _Leaps(selectors.SelectSelector):
    """Asked to wait for files or until a time, it lets that time have come."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled(f"at {self.now:.6f} s everything waits for something else")
        self.now += timeout
        return []
