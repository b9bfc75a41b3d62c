"""The board: where engines and gateways report once a second, and where gateways look for the whole. A Serve deployment of one replica."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specserve.api.service import Status
from specserve.metrics import Snapshot, merge

log = logging.getLogger(__name__)

ENGINE, GATEWAY = "engine", "gateway"
REPORT_EVERY_S = 1.0
SILENT_AFTER_S = 5.0  # who has not reported for so long is not there


@dataclass(frozen=True, slots=True)
class Report:
    """What one replica says of itself."""

    replica: str
    role: str
    trouble: str | None  # why an engine makes no progress
    metrics: Snapshot


class Board:
    """Keeps the last counters of those that are gone, so that sums never fall. Where all engines `may_sleep`, the next request wakes one."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, may_sleep: bool = False
    ) -> None:
        self._clock, self._may_sleep = clock, may_sleep
        self._reports: dict[str, tuple[float, Report]] = {}
        self._gone: Snapshot | None = None

    def report(self, report: Report) -> None:
        self._reports[report.replica] = (self._clock(), report)

    def status(self, besides: str = "") -> Status:
        """Of all, with the metrics of all `besides` one, who knows its own better."""
        self._forget_silent()
        engines = [report for _, report in self._reports.values() if report.role == ENGINE]
        troubles = [report.trouble for report in engines if report.trouble is not None]
        healthy = len(troubles) < len(engines) or (self._may_sleep and not engines)
        why = "" if healthy else "; ".join(troubles) or "no engine replica reports"
        metrics = [
            report.metrics for _, report in self._reports.values() if report.replica != besides
        ]
        if self._gone is not None:
            metrics.append(self._gone)
        return Status(
            ready=healthy,
            healthy=healthy,
            why=why,
            metrics=tuple(metrics),
            replicas=len(engines),
            troubles=tuple(troubles),
        )

    def _forget_silent(self) -> None:
        for replica, (when, report) in list(self._reports.items()):
            if self._clock() - when > SILENT_AFTER_S:
                del self._reports[replica]
                left = report.metrics.lasting()
                self._gone = left if self._gone is None else merge([self._gone, left])


async def report_for_ever(board: Any, make: Callable[[], Report]) -> None:
    """To the board's handle."""
    while True:
        try:
            await board.report.remote(make())
        except Exception:  # the board may be away; it will be told next time
            log.warning("the board took no report", exc_info=True)
        await asyncio.sleep(REPORT_EVERY_S)
