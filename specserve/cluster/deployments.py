"""Serve deployments: an engine with its workers, and the gateway in front of the engines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray import serve

from specserve.api.rates import ClientUse
from specserve.api.service import ServedModel
from specserve.cluster.board.autoscaling import CPU_METRIC, autoscaling_stats
from specserve.cluster.board.releases import await_gateways, model_of
from specserve.cluster.board.reporting import report_forever
from specserve.cluster.board.status_board import (
    ENGINE,
    GATEWAY,
    EngineInfo,
    GatewayAnswer,
    ReplicaReport,
)
from specserve.cluster.cpu_share import CpuShare
from specserve.cluster.engine.long_lived import freeze_objects
from specserve.cluster.engine.reply_streams import ReplyStreams
from specserve.cluster.engine.running_engine import RunningEngine
from specserve.cluster.gateway.replicas import EngineReplicas
from specserve.cluster.gateway.request_router import CACHED_TOKENS, PROTOCOL, RESTARTS
from specserve.cluster.logs import join_serve
from specserve.cluster.placement import Bundle
from specserve.cluster.transport.chunk_stream import ChunkReceiver
from specserve.cluster.transport.endpoint import Address
from specserve.config.features import part
from specserve.config.tree import Config
from specserve.errors import SpecserveError
from specserve.metrics import Registry
from specserve.tracing import tracer_from_environment
from specserve.types import Chunk, Request
from specserve.wire.version import VERSION

log = logging.getLogger(__name__)

OTHERS_S = 30.0
"""Time after the first model's engines that a gateway waits for the others' engines."""


class Engine:
    """Engine replica: a coordinator in this process, and its workers in the placement group."""

    # Serve awaits the constructor; type checkers do not know that.
    async def __init__(  # type: ignore[misc]
        self,
        config: Config,
        bundles: Sequence[Bundle],
        board: Any,
        label: str = "",
        pool: Any = None,
    ) -> None:
        """Start the workers; `label` is the model's name where several are served.

        `pool` is the handle of the draft pool.
        """
        join_serve(config)
        self._label = label
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._replies = ReplyStreams()
        self._running_engine = await RunningEngine.start(
            config,
            bundles,
            replica=self._replica,
            emit=self._emit,
            on_displaced=self._replies.end,
            joins=() if pool is None else part("draft_pools.link:joining")(pool, config.draft.pool),
        )
        self._coordinator, self._group = (
            self._running_engine.coordinator,
            self._running_engine.group,
        )
        self._reports = asyncio.create_task(report_forever(board, self._report))
        await await_gateways(board)
        freeze_objects()
        log.info("engine %s is ready: %s", self._replica, self._group.places)
        log.info("draft.placement: %s", self._group.draft_placement)
        if recommended := self._group.info.sampling_defaults:
            log.info("requests that do not say otherwise are sampled by %s", recommended)

    async def generate(
        self, request: Request, number: int, address: Address
    ) -> SpecserveError | None:
        """Serve a request until it ends; its chunks go to `address`.

        Returns None when the last chunk has been sent, or the error: that the request was refused,
        that it must continue on another engine, or that the gateway runs another release. Raises
        before anything runs if there are no file handles for a connection to the gateway.
        """
        try:
            address.require_same_version()  # the request may be of another shape
            self._replies.connect(address)
            seq_id = self._running_engine.submit(request)
        except SpecserveError as error:
            return error
        reply = self._replies.open(seq_id, number, address)
        try:
            return await reply.ended
        finally:
            if self._replies.discard(seq_id):  # the caller has gone, or its chunks were not sent
                self._coordinator.cancel(seq_id)

    async def info(self) -> EngineInfo:
        return EngineInfo(self._group.info)

    async def places(self) -> dict[str, Any]:
        """Return the place of each worker, for operators and tests."""
        return dict(self._group.places)

    async def pages_used(self) -> int:
        """Return the number of pages of the target's KV cache in use, as of its last round."""
        return self._group.target.pages_used

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics that Serve polls and passes to the autoscaling policy."""
        running = self._running_engine
        return autoscaling_stats(
            self._coordinator,
            num_pages=self._group.info.num_pages,
            first_tokens=running.records.first_tokens,
            start_seconds=running.start_seconds,
        )

    def record_routing_stats(self) -> dict[str, int]:
        """Return what Serve passes to the routers of all gateways."""
        info = self._group.info
        return {
            CACHED_TOKENS: info.num_pages * info.page_size,
            RESTARTS: self._group.restarts["target"],
            PROTOCOL: VERSION,
        }

    async def trace(self, last: int | None = None) -> dict[str, Any]:
        return self._running_engine.records.journal.trace(last)

    def check_health(self) -> None:
        """Raise WorkerLost when this replica can serve no more; Serve then replaces all of it."""
        self._running_engine.health.check()

    async def __del__(self) -> None:
        """Stop the workers; Serve calls this before it removes the replica."""
        if not hasattr(self, "_reports"):
            return
        self._reports.cancel()
        await self._running_engine.close()
        self._replies.close()

    def _emit(self, chunks: Sequence[Chunk]) -> None:
        self._replies.send(chunks, can_resume_elsewhere=self._coordinator.can_resume_elsewhere)

    def _report(self) -> ReplicaReport:
        health = self._running_engine.health
        return ReplicaReport(
            self._replica,
            ENGINE,
            health.trouble,
            self._running_engine.snapshot().of_model(self._label),
            self._group.draft_placement,
            health.device_troubles,
            self._group.losses,
            engine_key=self._replies.public_key,
            model=self._label,
            info=EngineInfo(self._group.info),
        )


@serve.ingress()
class Gateway:
    """HTTP server, which sends requests to the engines and receives chunks by its own link."""

    async def __init__(  # type: ignore[misc]
        self, config: Config, board: Any, *engines: Any
    ) -> None:
        """Open the tokenizers; `engines` are handles, one for each model in the config's order."""
        # Imported here, since engines and the command line need neither FastAPI nor transformers.
        from specserve.api.access import ClientAccess
        from specserve.api.model_directory import ModelDirectory
        from specserve.api.tokenizer import hide_torch

        hide_torch()
        join_serve(config)
        self._config = config
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._registry = Registry()
        names = [part.model for part in config.each_model]
        self._access = ClientAccess.from_config(config.http, self._registry, names)
        self._replicas: list[EngineReplicas] = []
        self._models = ModelDirectory(names)
        unknown_engine = asyncio.Event()
        self._opening = [
            asyncio.create_task(self._open_model(part, engine, board, unknown_engine))
            for part, engine in zip(config.each_model, engines, strict=True)
        ]
        await _await_models(self._opening)
        # From here on, without what starting took. Reports and the autoscaler look at different
        # times.
        self._reported_cpu, self._scaling_cpu = CpuShare(), CpuShare()
        self._reports = asyncio.create_task(
            report_forever(board, self._report, self._on_answer, unknown_engine)
        )

    async def _open_model(
        self, config: Config, engine: Any, board: Any, unknown_engine: asyncio.Event
    ) -> None:
        """Let requests choose a model once an engine of it runs."""
        from specserve.api.model_directory import ModelBackend
        from specserve.api.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(config.target.path, revision=config.target.revision)
        receiver = ChunkReceiver(ray.util.get_node_ip_address())
        has_several = self._models.has_several
        name = config.model if has_several else ""
        info = await model_of(engine, board, name, may_fail=not has_several)
        registry = Registry() if self._models.has_several else self._registry
        resumed = registry.counter("requests_resumed_total")
        replicas = EngineReplicas(
            engine,
            board,
            receiver,
            replica_id=self._replica,
            on_resume=lambda: resumed.add(1),
            unknown_engine=unknown_engine,
        )
        self._replicas.append(replicas)
        served = ServedModel.of(config, info, created=int(time.time()))
        self._models.add(ModelBackend.from_config(config, replicas, tokenizer, served, registry))

    def __serve_build_asgi_app__(self) -> Any:
        from specserve.api.app import build as build_app

        tracer = tracer_from_environment()
        app = build_app(self._models, self._config, self._registry, self._access, tracer)
        freeze_objects()
        return app

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics that Serve polls and passes to the autoscaling policy."""
        return {CPU_METRIC: self._scaling_cpu.read()}

    async def __del__(self) -> None:
        if hasattr(self, "_reports"):
            for task in (self._reports, *self._opening):
                task.cancel()
            for replicas in self._replicas:
                replicas.close()

    def _report(self) -> ReplicaReport:
        uses: tuple[ClientUse, ...] = ()
        if self._access is not None:
            self._access.trouble()  # so that its gauge is of this moment, also without requests
            uses = self._access.uses()
        self._registry.gauge("gateway_cpu_share").set(self._reported_cpu.read(), self._replica)
        snapshot = self._models.snapshot(self._registry)
        return ReplicaReport(self._replica, GATEWAY, None, snapshot, uses=uses)

    def _on_answer(self, answer: GatewayAnswer | None) -> None:
        """Take the board's answer to a report; None while the board is away."""
        if answer is not None:
            for replicas in self._replicas:
                replicas.admit_engines(answer.engines)
        if self._access is not None:
            self._access.charge_others({} if answer is None else answer.uses)


async def _await_models(opening: Sequence[asyncio.Task[None]]) -> None:
    """Return when all models are open, or the first is and others still start OTHERS_S later.

    A gateway that replaces a lost one thus serves although the engines of one model are down.
    Raises the first error.
    """
    await asyncio.wait(opening, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait(opening, timeout=OTHERS_S, return_when=asyncio.FIRST_EXCEPTION)
    for task in opening:
        if task.done():
            task.result()
        else:
            task.add_done_callback(_log_failure)


def _log_failure(opening: asyncio.Task[None]) -> None:
    if not opening.cancelled() and (error := opening.exception()) is not None:
        log.error("a model cannot be opened: %s", error)
