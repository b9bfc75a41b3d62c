"""Serve deployments: an engine with its workers, and the gateway in front of the engines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve

from specserve.api.app import build as build_app
from specserve.api.service import ServedModel
from specserve.api.tokenizer import Tokenizer
from specserve.cluster.autoscaling import autoscaling_stats
from specserve.cluster.gauges import Gauges
from specserve.cluster.group import TARGET, WorkerGroup
from specserve.cluster.logs import join_serve
from specserve.cluster.placement import Bundle
from specserve.cluster.replicas import EngineReplicas
from specserve.cluster.status_board import ENGINE, GATEWAY, ReplicaReport, report_forever
from specserve.cluster.transport.chunk_stream import ChunkReceiver, ChunkSender, StreamAddress
from specserve.config.tree import Config
from specserve.engine import Coordinator
from specserve.engine.trace import TraceJournal
from specserve.errors import Displaced, SpecserveError, WorkerLost
from specserve.metrics import Registry
from specserve.types import Chunk, FinishReason, ModelInfo, Request
from specserve.wire.messages import Chunks

log = logging.getLogger(__name__)

ROUND_SLACK_S = 5.0
"""Time that a round may take beyond the deadlines of its two workers."""


@dataclass(slots=True)
class _Reply:
    """Destination of the chunks of one sequence."""

    sender: ChunkSender
    number: int  # the gateway's own number of the request
    ended: asyncio.Future[SpecserveError | None]  # set to an error if the text did not finish


class Engine:
    """Engine replica: a coordinator in this process, and its workers in the placement group."""

    # Serve awaits the constructor; type checkers do not know that.
    async def __init__(  # type: ignore[misc]
        self, config: Config, bundles: Sequence[Bundle], board: Any
    ) -> None:
        join_serve(config)
        self._config = config
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._registry = Registry()
        self._replies: dict[int, _Reply] = {}
        self._senders: dict[StreamAddress, ChunkSender] = {}
        self._journal = TraceJournal(self._registry)
        self._group = await WorkerGroup.start(config, bundles, self._journal.record_exchange)
        self._coordinator = Coordinator(
            self._group.target,
            self._group.drafter,
            info=self._group.info,
            limits=config.limits,
            speculation=config.speculation,
            emit=self._emit,
            draft_context=self._group.draft_context,
            report=self._journal.record_round,
            remote_workers=True,
        )
        self._gauges = Gauges(self._registry)
        self._rounds = asyncio.create_task(self._coordinator.run())
        self._reports = asyncio.create_task(report_forever(board, self._report))
        log.info("engine %s is ready: %s", self._replica, self._group.places)

    async def generate(
        self, request: Request, number: int, address: StreamAddress
    ) -> SpecserveError | None:
        """Serve a request until it ends; its chunks go to `address`.

        Returns None when the last chunk has been sent, or the error: that the request was refused,
        or that it must continue on another engine.
        """
        try:
            seq_id = self._coordinator.submit(request)
        except SpecserveError as error:
            return error
        reply = self._replies[seq_id] = _Reply(
            self._sender(address), number, asyncio.get_running_loop().create_future()
        )
        try:
            return await reply.ended
        finally:
            if self._replies.pop(seq_id, None) is not None:  # the caller has gone
                self._coordinator.cancel(seq_id)

    async def info(self) -> ModelInfo:
        return self._group.info

    async def places(self) -> dict[str, Any]:
        """Return the place of each worker, for operators and tests."""
        return dict(self._group.places)

    async def pages_used(self) -> int:
        """Return the number of pages of the target's KV cache in use, as of its last round."""
        return self._group.target.pages_used

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics that Serve polls and passes to the autoscaling policy."""
        return autoscaling_stats(self._coordinator, num_pages=self._group.info.num_pages)

    async def trace(self, last: int | None = None) -> dict[str, Any]:
        return self._journal.trace(last)

    def check_health(self) -> None:
        """Raise WorkerLost when this replica can serve no more; Serve then replaces all of it."""
        trouble = self._fatal_trouble()
        if trouble is not None:
            raise WorkerLost(trouble)

    async def __del__(self) -> None:
        """Stop the workers; Serve calls this before it removes the replica."""
        if not hasattr(self, "_rounds"):
            return
        self._reports.cancel()
        self._coordinator.close()
        await asyncio.wait([self._rounds], timeout=5.0)
        await self._group.close()
        for sender in self._senders.values():
            sender.close()

    def _fatal_trouble(self) -> str | None:
        """Return why this replica cannot recover, or None.

        The coordinator has ended, the target will not be restarted, or a round lasts longer than
        its deadlines allow. Load alone is never a reason.
        """
        if self._group.is_lost:
            return self._group.troubles[TARGET]
        if self._rounds.done():
            reason = "cancelled" if self._rounds.cancelled() else self._rounds.exception()
            return f"the coordinator has ended: {reason}"
        since = self._coordinator.in_round_since
        if TARGET in self._group.troubles or since is None:
            return None
        longest = 2 * self._config.faults.round_deadline_s + ROUND_SLACK_S
        return "a round does not end" if time.perf_counter() - since > longest else None

    @property
    def _trouble(self) -> str | None:
        """Reason why this replica makes no progress at present, or None."""
        return self._fatal_trouble() or self._group.troubles.get(TARGET)

    def _emit(self, chunks: Sequence[Chunk]) -> None:
        """Send one message to each gateway that has chunks in this round."""
        by_sender: dict[ChunkSender, list[Chunk]] = {}
        for chunk in chunks:
            reply = (
                self._replies.get(chunk.seq_id)
                if chunk.finish is None
                else self._replies.pop(chunk.seq_id, None)
            )
            if reply is None:
                continue
            can_resume_elsewhere = (
                chunk.finish is FinishReason.ERROR and self._coordinator.can_resume_elsewhere
            )
            if not can_resume_elsewhere:
                by_sender.setdefault(reply.sender, []).append(replace(chunk, seq_id=reply.number))
            if chunk.finish is not None and not reply.ended.done():
                reply.ended.set_result(
                    Displaced(chunk.error or "the engine ends") if can_resume_elsewhere else None
                )
        for sender, mine in by_sender.items():
            sender.send(Chunks(tuple(mine)))

    def _sender(self, address: StreamAddress) -> ChunkSender:
        if address not in self._senders:
            self._close_idle_senders()
            self._senders[address] = ChunkSender(address)
        return self._senders[address]

    def _close_idle_senders(self) -> None:
        """Close the senders without requests: when a new gateway appears, old ones may be gone."""
        busy = {id(reply.sender) for reply in self._replies.values()}
        for address, sender in list(self._senders.items()):
            if id(sender) not in busy:
                sender.close()
                del self._senders[address]

    def _report(self) -> ReplicaReport:
        self._gauges.observe(self._coordinator, self._group)
        return ReplicaReport(self._replica, ENGINE, self._trouble, self._registry.snapshot())


@serve.ingress()
class Gateway:
    """HTTP server, which sends requests to the engines and receives chunks by its own link."""

    async def __init__(self, config: Config, engine: Any, board: Any) -> None:  # type: ignore[misc]
        join_serve(config)
        self._config = config
        self._tokenizer = Tokenizer.load(config.target.path, revision=config.target.revision)
        self._receiver = ChunkReceiver(ray.util.get_node_ip_address())
        info: ModelInfo = await engine.info.remote()
        self._model = ServedModel(
            name=config.model,
            vocab_size=info.vocab_size,
            max_context=min(info.max_context, info.num_pages * info.page_size),
            created=int(time.time()),
            max_gamma=config.speculation.max_gamma,
            is_encoder_decoder=info.decoder_start is not None,
        )
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._registry = Registry()
        resumed = self._registry.counter("requests_resumed_total")
        self._replicas = EngineReplicas(
            engine,
            board,
            self._receiver,
            replica_id=self._replica,
            on_resume=lambda: resumed.add(1),
        )
        self._reports = asyncio.create_task(report_forever(board, self._report))

    def __serve_build_asgi_app__(self) -> Any:
        return build_app(self._replicas, self._tokenizer, self._model, self._config, self._registry)

    async def __del__(self) -> None:
        if hasattr(self, "_reports"):
            self._reports.cancel()
            self._replicas.close()

    def _report(self) -> ReplicaReport:
        return ReplicaReport(self._replica, GATEWAY, None, self._registry.snapshot())
