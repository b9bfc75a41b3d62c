"""Simulated time: an event loop that jumps to the next timer, and the clock of a device."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits and no timer is set, so that the simulation would never end."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on simulated time.

    It is single-threaded and has no real files or signals, so the same program always runs in the
    same order.
    """

    def __init__(self) -> None:
        self._selector_clock = _JumpingSelector()
        super().__init__(self._selector_clock)

    def time(self) -> float:
        return self._selector_clock.now


class DeviceClock:
    """The time of a simulated device, which is ahead of the event loop's during a pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy = 0.0  # total seconds of passes
        self.asked = 0.0  # of these, seconds of passes that an engine waited for

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        """Advance by the duration of a pass."""
        self.now += seconds
        self.busy += seconds


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run like `asyncio.run`, from time 0. Raises Deadlock where that would wait forever."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class _JumpingSelector(selectors.SelectSelector):
    """A selector that advances its time by the timeout instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"at {self.now:.6f} s everything waits for something else")
        self.now += timeout
        return []
