"""Let gateways and engines of one release wait for each other while they replace another release.

Serve updates each deployment by itself: as soon as a new engine serves, an old one ends. So a new
engine begins to serve once a new gateway does, which learns of the engine's model from the board;
otherwise the old gateways would be left without engines. Knows handles; no HTTP and no models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from specserve.cluster.board.status_board import EngineInfo
from specserve.errors import VersionMismatch, first_line
from specserve.types import ModelInfo
from specserve.wire.version import require_same_version

log = logging.getLogger(__name__)

ASK_AGAIN_S = 1.0
GATEWAYS_S = 60.0
"""Longest time that an engine waits for gateways of its release, which may have no room."""
SWITCH_S = 2.0
"""Time in which Serve's proxies learn of a gateway that is ready."""


async def await_gateways(board: Any, *, wait_s: float = GATEWAYS_S) -> None:
    """Return once gateways of this release serve, or if there are none of another release."""
    until, has_waited = time.monotonic() + wait_s, False
    while time.monotonic() < until:
        awaits: bool | None = None
        with contextlib.suppress(RayError, RayServeException):  # the old board may not know
            awaits = await board.awaits_gateways.remote()
        if awaits is False:
            break
        if awaits and not has_waited:
            log.info("an update replaces another release: this engine waits for new gateways")
            has_waited = True
        await asyncio.sleep(ASK_AGAIN_S)
    if has_waited:
        await asyncio.sleep(SWITCH_S)


async def model_of(engine: Any, board: Any, name: str = "", *, may_fail: bool = True) -> ModelInfo:
    """Return what an engine of this release says of its model: itself, or by the board.

    While an update replaces engines of another release, one of those may answer; it is called
    again. So is a deployment that has failed unless the gateway `may_fail`: it has other models to
    serve.
    """
    answers = [
        asyncio.create_task(_ask_engine(engine, may_fail=may_fail)),
        asyncio.create_task(_ask_board(board, name)),
    ]
    try:
        done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for answer in answers:
            answer.cancel()


async def _ask_engine(engine: Any, *, may_fail: bool) -> ModelInfo:
    while True:
        try:
            answer = await engine.info.remote()
            require_same_version(getattr(answer, "version", None), getattr(answer, "release", None))
        except VersionMismatch as error:
            log.warning("a gateway waits for an engine of its own release: %s", error)
            await asyncio.sleep(ASK_AGAIN_S)
            continue
        except (RayError, RayServeException) as error:
            if may_fail:
                raise
            log.warning("a gateway waits for an engine of a model: %s", first_line(error))
            await asyncio.sleep(ASK_AGAIN_S)
            continue
        info: ModelInfo = answer.model
        return info


async def _ask_board(board: Any, name: str) -> ModelInfo:
    while True:
        with contextlib.suppress(RayError, RayServeException, VersionMismatch):
            answer: EngineInfo | None = await board.engine_info.remote(name)
            if answer is not None:
                answer.require_same_version()
                return answer.model
        await asyncio.sleep(ASK_AGAIN_S)
