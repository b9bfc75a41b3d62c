"""An engine without models, for measuring what stands around engines: on every beat it has some tokens for each request, and it knows when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specserve.cluster.placement import Bundle
from specserve.cluster.transport.chunk_stream import Outlet, Ticket
from specserve.config.tree import Config
from specserve.types import Chunk, Finish, ModelInfo, Origin, Request, Stats
from specserve.wire.messages import Chunks

BEAT_S, TOKENS = 0.05, 4
VOCAB, FIRST_ID = 4096, 300  # of the demo pair; ids from here on are ordinary pieces of text


@dataclass(slots=True)
class _Stream:
    request: Request
    number: int
    outlet: Outlet
    ended: asyncio.Future[None]
    written: int = 0


class Metronome:
    """Takes the place of `Engine` in `application`."""

    def __init__(self, config: Config, bundles: Sequence[Bundle], board: Any) -> None:
        self._streams: dict[int, _Stream] = {}
        self._outlets: dict[Ticket, Outlet] = {}
        self._first: dict[int, float] = {}
        self._count = 0
        self._beats: asyncio.Task[None] | None = None

    async def info(self) -> ModelInfo:
        return ModelInfo(
            vocab_size=VOCAB,
            max_context=1 << 20,
            end_ids=frozenset(),
            page_size=16,
            num_pages=1 << 20,
        )

    async def generate(self, request: Request, number: int, ticket: Ticket) -> None:
        self._beats = self._beats or asyncio.create_task(self._beat())
        if ticket not in self._outlets:
            self._outlets[ticket] = Outlet(ticket)
        self._count = key = self._count + 1
        stream = self._streams[key] = _Stream(
            request, number, self._outlets[ticket], asyncio.get_running_loop().create_future()
        )
        try:
            await stream.ended
        finally:
            self._streams.pop(key, None)

    async def first_times(self) -> dict[int, float]:
        """When the first tokens of each seed were there, by this machine's monotonic clock."""
        return self._first

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.monotonic()
            by_outlet: dict[Outlet, list[Chunk]] = {}
            for stream in list(self._streams.values()):
                self._first.setdefault(stream.request.seed, now)
                by_outlet.setdefault(stream.outlet, []).append(self._chunk(stream))
            for outlet, chunks in by_outlet.items():
                outlet.send(Chunks(tuple(chunks)))

    def _chunk(self, stream: _Stream) -> Chunk:
        left = stream.request.max_tokens - stream.written
        tokens = tuple(
            FIRST_ID + (stream.number * 7 + stream.written + i) % 1000
            for i in range(min(TOKENS, left))
        )
        stream.written += len(tokens)
        finish = Finish.LENGTH if stream.written == stream.request.max_tokens else None
        if finish is not None and not stream.ended.done():
            stream.ended.set_result(None)
        stats = (
            None if finish is None else Stats("coupled", True, stream.written // TOKENS, 0, 0, 0)
        )
        return Chunk(
            stream.number, tokens, (Origin.PLAIN,) * len(tokens), finish=finish, stats=stats
        )
