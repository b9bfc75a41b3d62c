"""Engine without models, for measuring everything around the engines.

At a fixed interval it emits some tokens for each request, and it records when.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve

from specserve.cluster.board.reporting import report_forever
from specserve.cluster.board.status_board import ENGINE, EngineInfo, ReplicaReport
from specserve.cluster.placement import Bundle
from specserve.cluster.transport.chunk_stream import ChunkSender
from specserve.cluster.transport.endpoint import Address, KeyPair
from specserve.config.tree import Config
from specserve.metrics import Snapshot
from specserve.types import Chunk, FinishReason, ModelInfo, Origin, Request, Stats
from specserve.wire.messages import Chunks

INTERVAL_S, TOKENS_PER_CHUNK = 0.05, 4
# Of the demo pair, whose ids from FIRST_ID on are ordinary pieces of text.
VOCAB, FIRST_ID = 4096, 300


@dataclass(slots=True)
class _Stream:
    request: Request
    number: int
    sender: ChunkSender
    ended: asyncio.Future[None]
    num_generated: int = 0


class PacedEngine:
    """Replacement of `Engine` in `application`, which emits tokens at a fixed pace."""

    # Serve awaits the constructor; type checkers do not know that.
    async def __init__(  # type: ignore[misc]
        self, config: Config, bundles: Sequence[Bundle], board: Any
    ) -> None:
        self._keys = KeyPair.generate()
        replica = serve.get_replica_context().replica_id.unique_id
        report = ReplicaReport(replica, ENGINE, None, Snapshot({}), engine_key=self._keys.public)
        self._reports = asyncio.create_task(report_forever(board, lambda: report))
        self._streams: dict[int, _Stream] = {}
        self._senders: dict[Address, ChunkSender] = {}
        self._first_token_times: dict[int, float] = {}
        self._count = 0
        self._task: asyncio.Task[None] | None = None

    async def info(self) -> EngineInfo:
        return EngineInfo(
            ModelInfo(
                vocab_size=VOCAB,
                max_context=1 << 20,
                end_ids=frozenset(),
                page_size=16,
                num_pages=1 << 20,
            )
        )

    async def generate(self, request: Request, number: int, address: Address) -> None:
        self._task = self._task or asyncio.create_task(self._emit_forever())
        if address not in self._senders:
            self._senders[address] = ChunkSender(address, self._keys)
        self._count = key = self._count + 1
        stream = self._streams[key] = _Stream(
            request,
            number,
            self._senders[address],
            asyncio.get_running_loop().create_future(),
            len(request.generated),
        )
        try:
            await stream.ended
        finally:
            self._streams.pop(key, None)

    async def first_token_times(self) -> dict[int, float]:
        """Return when the first tokens of each seed were emitted, by the monotonic clock."""
        return self._first_token_times

    async def _emit_forever(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            now = time.monotonic()
            by_sender: dict[ChunkSender, list[Chunk]] = {}
            for stream in list(self._streams.values()):
                self._first_token_times.setdefault(stream.request.seed, now)
                by_sender.setdefault(stream.sender, []).append(self._chunk(stream))
            for sender, chunks in by_sender.items():
                sender.send(Chunks(tuple(chunks)))

    def _chunk(self, stream: _Stream) -> Chunk:
        start = stream.num_generated
        left = stream.request.max_tokens - stream.num_generated
        tokens = tuple(
            FIRST_ID + (stream.number * 7 + stream.num_generated + i) % 1000
            for i in range(min(TOKENS_PER_CHUNK, left))
        )
        stream.num_generated += len(tokens)
        finish = FinishReason.LENGTH if stream.num_generated == stream.request.max_tokens else None
        if finish is not None and not stream.ended.done():
            stream.ended.set_result(None)
        stats = (
            None
            if finish is None
            else Stats("coupled", True, stream.num_generated // TOKENS_PER_CHUNK, 0, 0, 0)
        )
        return Chunk(
            stream.number, start, tokens, (Origin.PLAIN,) * len(tokens), finish=finish, stats=stats
        )
