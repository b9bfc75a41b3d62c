"""Count the failures of workers by device, and name devices to avoid. Knows no Ray."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MAX_FAILURES = 5
"""Lost workers of a device within WINDOW_S after which it is avoided.

More than a request costs that crashes its workers, before it fails alone (MAX_LOSSES).
"""
WINDOW_S = 600.0
"""Time after which a failure counts no more, so that an avoided device gets another chance."""


@dataclass(frozen=True, slots=True)
class DeviceId:
    """A device of one node: a GPU by Ray's id, or the node's CPUs."""

    node: str  # Ray's id of the node
    name: str  # as WorkerPlace.hardware

    def __str__(self) -> str:
        return f"{self.name} of node {self.node}"


class DeviceFailures:
    """Failures of one engine's workers in the last WINDOW_S, by device."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[DeviceId, deque[float]] = {}

    def record_loss(self, device: DeviceId) -> bool:
        """Count a lost worker, and return whether its device is to be avoided from now on."""
        return self._record(device, 1)

    def record_fault(self, device: DeviceId) -> bool:
        """Count a failed self-test, or lasting slowness, which is enough by itself."""
        return self._record(device, MAX_FAILURES)

    @property
    def avoided(self) -> tuple[DeviceId, ...]:
        """Devices with MAX_FAILURES."""
        since = self._clock() - WINDOW_S
        return tuple(
            device
            for device, times in self._times.items()
            if sum(time > since for time in times) >= MAX_FAILURES
        )

    def _record(self, device: DeviceId, times: int) -> bool:
        was_avoided = device in self.avoided
        self._times.setdefault(device, deque(maxlen=MAX_FAILURES)).extend([self._clock()] * times)
        return not was_avoided and device in self.avoided
