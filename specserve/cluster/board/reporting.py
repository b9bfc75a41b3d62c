"""Report to the status board: engines, gateways and devices of draft pools do it all the time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from specserve.cluster.board.status_board import Answer, ReplicaReport

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
MIN_REPORT_S = 0.05
"""Time between two reports of a gateway that meets keys which it does not know."""


async def report_forever(
    board: Any,
    make: Callable[[], ReplicaReport],
    on_answer: Callable[[Any], None] = lambda answer: None,
    wanted: asyncio.Event | None = None,
) -> None:
    """Report to the board's handle once a second, and soon after an answer is `wanted`.

    `on_answer` takes each answer; None while the board is away.
    """
    wanted = wanted or asyncio.Event()
    while True:
        wanted.clear()
        try:
            answer: Answer | None = await board.report.remote(make())
            if answer is not None:
                answer.require_same_version()
        except Exception:  # the board may be away; the next report will reach it
            log.warning("the board took no report", exc_info=True)
            answer = None
        on_answer(answer)
        await asyncio.sleep(MIN_REPORT_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wanted.wait(), REPORT_EVERY_S - MIN_REPORT_S)
