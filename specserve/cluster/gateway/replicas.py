"""Serve the HTTP server's requests by the engine replicas, resuming them when a replica is lost.

Each request is one Serve call, which routes, limits, scales and cancels; it lasts as long as the
request and returns at most an error. The tokens arrive by the gateway's own link.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from specserve.api.service import Status
from specserve.cluster.board.status_board import EngineKeys
from specserve.cluster.gateway.resume import ResumableRequest
from specserve.cluster.transport.chunk_stream import ChunkReceiver
from specserve.errors import (
    Displaced,
    Overloaded,
    SpecserveError,
    Unavailable,
    UnsuitableEngine,
    VersionMismatch,
    WorkerLost,
    first_line,
)
from specserve.types import Chunk, Request

log = logging.getLogger(__name__)

# Time within which the last chunk must follow the end of its call; later it counts as lost. It is
# normally there first, or comes once a broken connection is back, which takes half a second.
LAST_CHUNK_S = 1.0
FULL_RETRY_S = 0.5
"""Time between two attempts to resume a request while every queue is full."""
# While engines refuse requests, as many are sent to them as have ended, and one more every
# PROBE_EVERY_S seconds; others are refused here. An engine's refusal takes long beside its other
# work, and a flood of them would take its time from the requests that it serves.
PROBE_EVERY_S = 2.0
FULL_FOR_S = 4.0
"""Seconds after the last refusal of an engine, from which on all requests are sent again."""

NUMBER_BITS = 64
"""Random bits of the number of a call."""
BOARD_ANSWERS_S, BOARD_AWAY_S, BOARD_YOUNG_S = 2.0, 60.0, 3.0
"""Seconds that the board has to answer, may be away, and has no reports yet when it is new."""
# Engines that cannot take a request, as in an update, when some run another release. Others are
# tried for so long before it is refused: engines of its release may only be full or starting.
UNSUITABLE_S = 10.0
FIRST_UNSUITABLE_RETRY_S, UNSUITABLE_RETRY_S = 0.05, 0.5
ChunkQueue = asyncio.Queue[Chunk | SpecserveError]


@dataclass(slots=True)
class _OpenCall:
    """Chunks of one call that is under way, and the key of the engine that has it.

    The number of a call is random, and only the engine that has it is given it. So the first sender
    of chunks with that number is that engine, and from then on all others' chunks are dropped.
    """

    chunks: ChunkQueue = field(default_factory=ChunkQueue)
    engine: bytes | None = None

    def accepts(self, engine: bytes) -> bool:
        """Return whether chunks of this engine belong here."""
        if self.engine is None:
            self.engine = engine
        return self.engine == engine


class EngineReplicas:
    """Implementation of `api.service.Service` over handles of the engine and of the board."""

    def __init__(
        self,
        engine: Any,
        board: Any,
        receiver: ChunkReceiver,
        *,
        replica_id: str,
        on_resume: Callable[[], None],
        unknown_engine: asyncio.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep the handles; `on_resume` is called each time that a request is resumed.

        `unknown_engine` is set when an engine with an unknown key connects, until the board names
        it.
        """
        self._engine, self._board, self._receiver = engine, board, receiver
        self._replica_id, self._on_resume, self._clock = replica_id, on_resume, clock
        self._calls: dict[int, _OpenCall] = {}  # by random numbers
        self._engine_keys: frozenset[bytes] = frozenset()
        self.unknown_engine = asyncio.Event() if unknown_engine is None else unknown_engine
        receiver.on_unknown_engine = self.unknown_engine.set
        self._full_until, self._why_full, self._next_probe = 0.0, "", 0.0
        # Streams that have ended since an engine refused a request, less those that began since.
        self._num_ended = 0
        self._last_status: Status | None = None  # the last healthy one, with engines
        self._last_status_at = 0.0
        self._dispatch_task = asyncio.create_task(self._dispatch())

    def admit_engines(self, engines: EngineKeys) -> None:
        """Take chunks of these engines, and no longer of those that the board does not name."""
        kept = frozenset() if engines.is_complete else self._engine_keys
        self._engine_keys = engines.keys | kept
        self._receiver.admit(self._engine_keys)

    def require_room(self) -> None:
        """Raise Overloaded if engines refuse requests, and no place has become free since.

        One request may ask them all the same every PROBE_EVERY_S, and all may after FULL_FOR_S.
        """
        if not self._num_ended and self._clock() < min(self._full_until, self._next_probe):
            raise Overloaded(self._why_full)

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a request, from one engine after another if engines are lost.

        A full queue refuses only a request that no engine has started. Ask `require_room` before
        the first continuation of a request; the others may follow.
        """
        self._count_begun()
        resumable = ResumableRequest(request)
        unsuitable_until, unsuitable_backoff = math.inf, FIRST_UNSUITABLE_RETRY_S
        while True:
            try:
                async with aclosing(self._attempt(resumable.request)) as chunks:
                    async for chunk in chunks:
                        recorded = resumable.record_chunk(chunk)
                        if recorded is None:
                            continue
                        yield recorded
                        if recorded.finish is not None:
                            return
            except (WorkerLost, Displaced) as error:
                backoff = resumable.on_engine_lost(error)
                log.warning("a request goes on elsewhere: %s", error)
                self._on_resume()
                unsuitable_until, unsuitable_backoff = math.inf, FIRST_UNSUITABLE_RETRY_S
            except UnsuitableEngine as error:
                unsuitable_until = min(unsuitable_until, self._clock() + UNSUITABLE_S)
                if self._clock() > unsuitable_until:
                    raise
                log.warning("another engine is tried: %s", error)
                backoff = unsuitable_backoff
                unsuitable_backoff = min(2.0 * backoff, UNSUITABLE_RETRY_S)
            except (Overloaded, Unavailable) as error:
                if isinstance(error, Overloaded):
                    self._count_refusal(error)
                if not resumable.num_resumed:
                    raise
                backoff = FULL_RETRY_S
            await asyncio.sleep(backoff)

    def _count_begun(self) -> None:
        """Count a request that is sent: it takes the place of one that ended, or is a probe."""
        if self._num_ended:
            self._num_ended -= 1
        else:
            self._next_probe = self._clock() + PROBE_EVERY_S

    def _count_refusal(self, error: Overloaded) -> None:
        """Count that an engine is full, for which others are refused here for a time."""
        self._full_until, self._why_full = self._clock() + FULL_FOR_S, str(error)
        self._next_probe = self._clock() + PROBE_EVERY_S
        self._num_ended = 0

    async def _attempt(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of one engine.

        Chunks that it sends after the attempt has ended carry an old number and are dropped.
        """
        number, opened = secrets.randbits(NUMBER_BITS), _OpenCall()
        self._calls[number], queue = opened, opened.chunks
        call = self._engine.generate.remote(request, number, self._receiver.address)
        watcher = asyncio.create_task(_watch_call(call, opened))
        ended, frees_place = False, True
        try:
            while not ended:
                chunk = await queue.get()
                if isinstance(chunk, SpecserveError):  # refused, or lost with its engine
                    frees_place = False
                    raise chunk
                ended = chunk.finish is not None
                yield chunk
        finally:
            del self._calls[number]
            self._num_ended += frees_place
            if not ended and not watcher.done():
                call.cancel()
            watcher.cancel()

    async def status(self) -> Status:
        """Return the board's status; while the board is away, the last one for some time.

        All gateways would become unready together otherwise, although the engines serve. A board
        that has just restarted knows no engines yet.
        """
        try:
            async with asyncio.timeout(BOARD_ANSWERS_S):
                status: Status = await self._board.status.remote(self._replica_id)
            status.require_same_version()
        except (RayError, RayServeException, TimeoutError, VersionMismatch) as error:
            if (known := self._known_status(BOARD_AWAY_S)) is not None:
                return known
            why = f"the engines' board does not answer: {type(error).__name__}"
            if isinstance(error, VersionMismatch):
                why = f"the engines' board is of another release: {error}"
            return Status(ready=False, healthy=False, why=why, metrics=(), replicas=0)
        if not status.replicas and (known := self._known_status(BOARD_YOUNG_S)) is not None:
            return known
        if status.healthy and status.replicas:
            self._last_status, self._last_status_at = status, self._clock()
        return status

    def _known_status(self, seconds: float) -> Status | None:
        """Return the last healthy status that is no older than this."""
        is_recent = self._clock() - self._last_status_at <= seconds
        return self._last_status if is_recent else None

    async def trace(self, last: int | None = None) -> Mapping[str, Any]:
        try:
            trace: Mapping[str, Any] = await self._engine.trace.remote(last)
        except (RayError, RayServeException) as error:
            raise Unavailable(f"no engine has a trace now: {type(error).__name__}") from error
        return trace

    def close(self) -> None:
        self._dispatch_task.cancel()
        self._receiver.close()

    async def _dispatch(self) -> None:
        """Put each chunk into the queue of its request.

        Chunks of requests that have ended, or that another engine has, are dropped.
        """
        while True:
            received = await self._receiver.receive()
            for chunk in received.chunks:
                call = self._calls.get(chunk.seq_id)
                if call is None:
                    continue
                if call.accepts(received.engine):
                    call.chunks.put_nowait(chunk)
                else:
                    log.error("an engine sent chunks of a request that another engine has")


async def _watch_call(call: Any, opened: _OpenCall) -> None:
    """Put the error that ends a request without a last chunk into its queue.

    The engine refused it, or its replica died.
    """
    try:
        failure = await call
        if failure is None:  # the last chunk has been sent, and normally overtakes this answer
            await asyncio.sleep(LAST_CHUNK_S)
            failure = WorkerLost("the end of the text was lost between engine and gateway")
        elif isinstance(failure, VersionMismatch):
            failure = UnsuitableEngine(str(failure))
    except BackPressureError as error:
        failure = Overloaded(str(error))
    except DeploymentUnavailableError as error:
        failure = Unavailable(f"the engine is not available: {error}")
    except RayActorError:
        failure = WorkerLost("the engine replica died")
    except (RayError, RayServeException) as error:
        log.exception("a request's call failed")
        failure = WorkerLost(f"the request's call failed: {type(error).__name__}")
        if isinstance(error, RayTaskError) and opened.engine is None:
            # It failed on the call itself, as an engine of another release may.
            cause = first_line(error.cause or error)
            failure = UnsuitableEngine(f"an engine could not take the request: {cause}")
    opened.chunks.put_nowait(failure)
