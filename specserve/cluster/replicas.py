"""The engine replicas as the HTTP server knows them: a Serve call for each request, and the tokens by the gateway's link.

The call routes, holds back, scales and cancels; it lasts as long as the request, and says at most why it was refused.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from specserve.api.service import Status
from specserve.cluster.resume import Story
from specserve.cluster.transport.chunk_stream import Inbox
from specserve.errors import Displaced, Overloaded, SpecserveError, Unavailable, WorkerLost
from specserve.types import Chunk, Request

log = logging.getLogger(__name__)

LAST_CHUNK_S = 5.0  # within which the last chunk follows the end of its call
FULL_S = 0.5  # between two tries to go on where every queue is full
STILL_FULL_S = 0.05  # after a refusal nobody else is sent to ask: a flood of refusals must not take the engine's time from those it serves

Mail = asyncio.Queue[Chunk | SpecserveError]


class Replicas:
    """Implements `api.service.Service` over handles of the engine and of the board."""

    def __init__(
        self, engine: Any, board: Any, inbox: Inbox, *, own: str, resumed: Callable[[], None]
    ) -> None:
        """`resumed` is told each time that a request goes on elsewhere."""
        self._engine, self._board, self._inbox, self._own, self._resumed = (
            engine,
            board,
            inbox,
            own,
            resumed,
        )
        self._numbers = itertools.count()
        self._mail: dict[int, Mail] = {}
        self._full_until, self._why_full = 0.0, ""
        self._sorting = asyncio.create_task(self._sort())

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """An engine that goes away is followed by another one. Only what no engine has begun is refused for a full queue."""
        if time.monotonic() < self._full_until:
            raise Overloaded(self._why_full)
        story = Story(request)
        while True:
            try:
                async with aclosing(self._attempt(story.request)) as chunks:
                    async for chunk in chunks:
                        yield story.take(chunk)
                        if chunk.finish is not None:
                            return
            except (WorkerLost, Displaced) as error:
                pause = story.lost(error)
                log.warning("a request goes on elsewhere: %s", error)
                self._resumed()
            except (Overloaded, Unavailable) as error:
                if isinstance(error, Overloaded):
                    self._full_until, self._why_full = time.monotonic() + STILL_FULL_S, str(error)
                if not story.num_resumed:
                    raise
                pause = FULL_S
            await asyncio.sleep(pause)

    async def _attempt(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """By one engine. Chunks that it sends after it was given up have an old number, and are dropped."""
        number, mail = next(self._numbers), Mail()
        self._mail[number] = mail
        call = self._engine.generate.remote(request, number, self._inbox.ticket)
        watch = asyncio.create_task(_watch(call, mail))
        ended = False
        try:
            while not ended:
                chunk = await mail.get()
                if isinstance(chunk, SpecserveError):
                    raise chunk
                ended = chunk.finish is not None
                yield chunk
        finally:
            del self._mail[number]
            if not ended and not watch.done():
                call.cancel()
            watch.cancel()

    async def status(self) -> Status:
        try:
            status: Status = await self._board.status.remote(self._own)
        except (RayError, RayServeException) as error:
            return Status(
                ready=False,
                healthy=False,
                why=f"the engines' board does not answer: {type(error).__name__}",
                metrics=(),
                replicas=0,
            )
        return status

    async def trace(self, last: int | None = None) -> Mapping[str, Any]:
        try:
            trace: Mapping[str, Any] = await self._engine.trace.remote(last)
        except (RayError, RayServeException) as error:
            raise Unavailable(f"no engine has a trace now: {type(error).__name__}") from error
        return trace

    def close(self) -> None:
        self._sorting.cancel()
        self._inbox.close()

    async def _sort(self) -> None:
        """Each chunk to the request that it belongs to. Those of requests that have gone are dropped."""
        while True:
            for chunk in (await self._inbox.receive()).chunks:
                mail = self._mail.get(chunk.seq_id)
                if mail is not None:
                    mail.put_nowait(chunk)


async def _watch(call: Any, mail: Mail) -> None:
    """Puts into the mail what ends a request otherwise than by its last chunk: a refusal, or the death of the replica."""
    try:
        refusal = await call
        if refusal is None:  # the last chunk has been sent, and normally overtakes this answer
            await asyncio.sleep(LAST_CHUNK_S)
            refusal = WorkerLost("the end of the text was lost between engine and gateway")
    except BackPressureError as error:
        refusal = Overloaded(str(error))
    except DeploymentUnavailableError as error:
        refusal = Unavailable(f"the engine is not available: {error}")
    except RayActorError:
        refusal = WorkerLost("the engine replica died")
    except (RayError, RayServeException) as error:
        log.exception("a request's call failed")
        refusal = WorkerLost(f"the request's call failed: {type(error).__name__}")
    mail.put_nowait(refusal)
