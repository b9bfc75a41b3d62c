"""The engine of this process as the HTTP server sees it, which can pause and sleep.

Knows neither HTTP nor Ray Serve LLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

from specserve.api.service import Status
from specserve.cluster.engine.running_engine import RunningEngine
from specserve.errors import BadValue, SpecserveError, Unavailable, WorkerLost
from specserve.types import Chunk, FinishReason, Request

PAUSE_MODES = ("abort", "wait", "keep")
POLL_S = 0.005
ABORTED = "the engine was paused while it served this request; send it again"


class LocalService:
    """Requests of this process, their readers, and the gate before which new ones wait."""

    def __init__(self) -> None:
        self.running: RunningEngine
        self.is_paused = self.is_sleeping = False
        self._readers: dict[int, asyncio.Queue[Chunk | SpecserveError]] = {}
        self._gate = asyncio.Event()
        self._num_resets = 0  # of the prefix cache

    def attach(self, running: RunningEngine) -> None:
        """Serve by this engine, the first or the one after a sleep."""
        self.running, self.is_sleeping = running, False
        self._open_gate()

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        await self._gate.wait()
        seq_id = self.running.submit(self._salted(request))
        reader = self._readers[seq_id] = asyncio.Queue()
        try:
            while True:
                chunk = await reader.get()
                if isinstance(chunk, SpecserveError):
                    raise chunk
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            if self._readers.get(seq_id) is reader:  # its last chunk has not come
                del self._readers[seq_id]
                self.running.coordinator.cancel(seq_id)

    def require_room(self) -> None:
        """Refuse nothing: the coordinator itself refuses what it cannot take."""

    async def status(self) -> Status:
        if self.is_sleeping:
            return Status(ready=False, healthy=True, why="the engine sleeps", replicas=1)
        health, group = self.running.health, self.running.group
        trouble = health.trouble
        return Status(
            ready=trouble is None and not self.is_paused,
            healthy=trouble is None,
            why=trouble or ("the engine is paused" if self.is_paused else ""),
            replicas=1,
            troubles=() if trouble is None else (trouble,),
            device_troubles=health.device_troubles,
            losses=group.losses,
            draft_placements=() if group.draft_placement is None else (group.draft_placement,),
            irreproducible=() if (reason := group.info.irreproducible) is None else (reason,),
            metrics=(self.running.snapshot(),),
        )

    async def trace(self, last: int | None = None) -> Mapping[str, object]:
        return self.running.records.journal.trace(last)

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Let new requests wait until `resume`, and return when no round runs any more.

        Those under way end with an error (`abort`), or are completed first (`wait`), or stay as
        they are until then (`keep`).
        """
        if mode not in PAUSE_MODES:
            raise BadValue(
                f"mode must be one of {', '.join(PAUSE_MODES)}, not {mode}", param="mode"
            )
        self.is_paused = True
        self._gate.clear()
        coordinator = self.running.coordinator
        if mode == "keep":
            coordinator.pause()
            await _until(lambda: coordinator.in_round_since is None)
        else:
            await self._drain(abort=mode == "abort")
        if clear_cache:
            self.reset_prefix_cache()

    def resume(self) -> None:
        """Go on with requests that were kept, and take those that wait."""
        self.is_paused = False
        self.running.coordinator.resume()
        self._open_gate()

    async def close(self) -> None:
        """End the workers, if there are any."""
        if hasattr(self, "running") and not self.is_sleeping:
            await self.running.close()

    async def sleep(self) -> None:
        """End the requests under way with an error, and the workers; `attach` ends the sleep."""
        self.is_sleeping = True
        self._gate.clear()
        await self._drain(abort=True)
        await self.running.close()

    def reset_prefix_cache(self) -> None:
        """Let later requests find no page of earlier ones, whose pages are the first evicted.

        Their salts differ from now on, in the caches of all workers.
        """
        self._num_resets += 1

    def emit(self, chunks: Sequence[Chunk]) -> None:
        """Hand the chunks of a round to their readers."""
        for chunk in chunks:
            reader = self._readers.get(chunk.seq_id)
            if reader is None:
                continue
            if chunk.finish is not None:
                del self._readers[chunk.seq_id]
            if chunk.finish is FinishReason.ERROR and self.running.coordinator.can_resume_elsewhere:
                reader.put_nowait(WorkerLost(chunk.error or "the engine ends; send it again"))
            else:
                reader.put_nowait(chunk)

    def end(self, seq_id: int, error: SpecserveError) -> None:
        """End the text of a sequence that gets no chunk any more."""
        reader = self._readers.pop(seq_id, None)
        if reader is not None:
            reader.put_nowait(error)

    def _salted(self, request: Request) -> Request:
        if not self._num_resets:
            return request
        key = self._num_resets.to_bytes(8, "big")
        salt = blake2b(request.cache_salt, key=key, digest_size=16).digest()
        return replace(request, cache_salt=salt)

    def _open_gate(self) -> None:
        if not self.is_paused and not self.is_sleeping:
            self._gate.set()

    async def _drain(self, *, abort: bool) -> None:
        """Return when no request is under way, after their ends or, with `abort`, at once."""
        coordinator = self.running.coordinator
        coordinator.resume()
        if abort:
            for seq_id in list(self._readers):
                coordinator.cancel(seq_id)
                self.end(seq_id, Unavailable(ABORTED))
        await _until(lambda: not coordinator.has_work or coordinator.trouble is not None)


async def _until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(POLL_S)
