"""Why an engine replica makes no progress, and whether it can recover. Knows no requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from specserve.cluster.engine.group import TARGET, WorkerGroup
from specserve.cluster.engine.node_drain import DrainWatch
from specserve.engine import Coordinator
from specserve.errors import WorkerLost

ROUND_SLACK_S = 5.0
"""Time that a round may take beyond the deadlines of its two workers."""


class EngineHealth:
    """The health of a replica. Load alone never makes it unhealthy."""

    def __init__(
        self,
        coordinator: Coordinator,
        group: WorkerGroup,
        rounds: asyncio.Future[None],
        *,
        round_deadline_s: float,
        drain: DrainWatch | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Watch a coordinator, its workers, its task and, with `drain`, the nodes of its ranks.

        `clock` is the coordinator's.
        """
        self._coordinator, self._group, self._rounds = coordinator, group, rounds
        self._longest_round_s = 2 * round_deadline_s + ROUND_SLACK_S
        self._drain, self._clock = drain, clock

    @property
    def trouble(self) -> str | None:
        """Reason why this replica makes no progress at present, or None."""
        return self.fatal_trouble or self._group.troubles.get(TARGET)

    @property
    def device_troubles(self) -> tuple[str, ...]:
        """Devices that are avoided; progress goes on, elsewhere or with them."""
        return tuple(
            f"{device} has failed and is avoided"
            + (f", though {' and '.join(users)} must use it" if users else "")
            for device, users in self._group.avoided_devices.items()
        )

    @property
    def fatal_trouble(self) -> str | None:
        """Reason why this replica cannot recover, or None.

        The target will not be restarted, the coordinator has given up or ended, a round lasts
        longer than its deadlines allow, or a rank is about to lose its node.
        """
        if self._group.is_lost:
            return self._group.troubles[TARGET]
        if self._coordinator.trouble is not None:
            return self._coordinator.trouble
        if self._rounds.done():
            reason = "cancelled" if self._rounds.cancelled() else self._rounds.exception()
            return f"the coordinator has ended: {reason}"
        if self._drain is not None and self._drain.trouble is not None:
            return self._drain.trouble
        since = self._coordinator.in_round_since
        if since is None or TARGET in self._group.troubles:
            return None
        return "a round does not end" if self._clock() - since > self._longest_round_s else None

    def check(self) -> None:
        """Raise WorkerLost when this replica can serve no more; Serve then replaces all of it."""
        if self.fatal_trouble is not None:
            raise WorkerLost(self.fatal_trouble)
