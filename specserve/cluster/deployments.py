"""The Serve deployments that do the work: an engine with its workers, and the gateway in front."""

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
from specserve.api.service import Served
from specserve.api.tokenizer import Text
from specserve.cluster.autoscaling import stats
from specserve.cluster.gauges import Gauges
from specserve.cluster.group import TARGET, Group
from specserve.cluster.logs import join_serve
from specserve.cluster.placement import Bundle
from specserve.cluster.replicas import Replicas
from specserve.cluster.status_board import ENGINE, GATEWAY, Report, report_for_ever
from specserve.cluster.transport.chunk_stream import Inbox, Outlet, Ticket
from specserve.config.tree import Config
from specserve.engine import Coordinator
from specserve.engine.trace import Journal
from specserve.errors import Displaced, SpecserveError, WorkerLost
from specserve.metrics import Registry
from specserve.types import Chunk, Finish, ModelInfo, Request
from specserve.wire.messages import Chunks

log = logging.getLogger(__name__)

ROUND_SLACK_S = 5.0  # beyond the deadlines of its two workers


@dataclass(slots=True)
class _Reply:
    """Where the chunks of one sequence go."""

    outlet: Outlet
    number: int  # the gateway's own, of the request
    ended: asyncio.Future[
        SpecserveError | None
    ]  # with a refusal, if the text did not come to its end


class Engine:
    """One replica: a coordinator in this process, and its workers in the other bundles of its placement group."""

    async def __init__(self, config: Config, bundles: Sequence[Bundle], board: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        join_serve(config)
        self._config = config
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._registry = Registry()
        self._replies: dict[int, _Reply] = {}
        self._outlets: dict[Ticket, Outlet] = {}
        self._journal = Journal(self._registry)
        self._group = await Group.start(config, bundles, self._journal.exchange)
        self._coordinator = Coordinator.of(
            config,
            self._group.target,
            self._group.drafter,
            info=self._group.info,
            emit=self._emit,
            draft_context=self._group.draft_context,
            report=self._journal.record,
            overlaps=True,
        )
        self._gauges = Gauges(self._registry)
        self._rounds = asyncio.create_task(self._coordinator.run())
        self._reports = asyncio.create_task(report_for_ever(board, self._report))
        log.info("engine %s is ready: %s", self._replica, self._group.places)

    async def generate(
        self, request: Request, number: int, ticket: Ticket
    ) -> SpecserveError | None:
        """Lasts as long as the request. Its chunks leave by the ticket's link; a refusal is the result, and so is that it must go elsewhere."""
        try:
            seq_id = self._coordinator.submit(request)
        except SpecserveError as refusal:
            return refusal
        reply = self._replies[seq_id] = _Reply(
            self._outlet(ticket), number, asyncio.get_running_loop().create_future()
        )
        try:
            return await reply.ended
        finally:
            if self._replies.pop(seq_id, None) is not None:  # the caller has gone
                self._coordinator.cancel(seq_id)

    async def info(self) -> ModelInfo:
        return self._group.info

    async def places(self) -> dict[str, Any]:
        """Where each worker runs; for operators and tests."""
        return dict(self._group.places)

    async def pages_used(self) -> int:
        """Of the target's cache, as of its last round."""
        return self._group.target.pages_used

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks every now and then, and hands it to the policy."""
        return stats(self._coordinator, num_pages=self._group.info.num_pages)

    async def trace(self, last: int | None = None) -> dict[str, Any]:
        return self._journal.trace(last)

    def check_health(self) -> None:
        """Raises when this replica can serve no more: Serve then replaces it, workers and all."""
        end = self._end()
        if end is not None:
            raise WorkerLost(end)

    async def __del__(self) -> None:
        """Serve calls this when the replica is to go."""
        if not hasattr(self, "_rounds"):
            return
        self._reports.cancel()
        self._coordinator.close()
        await asyncio.wait([self._rounds], timeout=5.0)
        await self._group.close()
        for outlet in self._outlets.values():
            outlet.close()

    def _end(self) -> str | None:
        """A coordinator or target that will not come back, or a round that began longer ago than its deadline: never mere load."""
        if self._group.is_lost:
            return self._group.troubles[TARGET]
        if self._rounds.done():
            return f"the coordinator has ended: {self._rounds.exception() if not self._rounds.cancelled() else 'cancelled'}"
        since = self._coordinator.in_round_since
        if TARGET in self._group.troubles or since is None:
            return None
        longest = 2 * self._config.faults.round_deadline_s + ROUND_SLACK_S
        return "a round does not end" if time.perf_counter() - since > longest else None

    @property
    def _trouble(self) -> str | None:
        """Why this replica makes no progress now."""
        return self._end() or self._group.troubles.get(TARGET)

    def _emit(self, chunks: Sequence[Chunk]) -> None:
        """One message for each gateway that has chunks in this round."""
        by_outlet: dict[Outlet, list[Chunk]] = {}
        for chunk in chunks:
            reply = (
                self._replies.get(chunk.seq_id)
                if chunk.finish is None
                else self._replies.pop(chunk.seq_id, None)
            )
            if reply is None:
                continue
            displaced = chunk.finish is Finish.ERROR and self._coordinator.displaced
            if not displaced:
                by_outlet.setdefault(reply.outlet, []).append(replace(chunk, seq_id=reply.number))
            if chunk.finish is not None and not reply.ended.done():
                reply.ended.set_result(
                    Displaced(chunk.error or "the engine ends") if displaced else None
                )
        for outlet, mine in by_outlet.items():
            outlet.send(Chunks(tuple(mine)))

    def _outlet(self, ticket: Ticket) -> Outlet:
        if ticket not in self._outlets:
            self._close_idle()
            self._outlets[ticket] = Outlet(ticket)
        return self._outlets[ticket]

    def _close_idle(self) -> None:
        """When a new gateway shows up, those that have no requests here may be gone."""
        busy = {id(reply.outlet) for reply in self._replies.values()}
        for ticket, outlet in list(self._outlets.items()):
            if id(outlet) not in busy:
                outlet.close()
                del self._outlets[ticket]

    def _report(self) -> Report:
        self._gauges.observe(self._coordinator, self._group)
        return Report(self._replica, ENGINE, self._trouble, self._registry.snapshot())


@serve.ingress()
class Gateway:
    """The HTTP server. Tokens in, text out; its requests' chunks come by its own link."""

    async def __init__(self, config: Config, engine: Any, board: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        join_serve(config)
        self._config = config
        self._text = Text.load(config.target.path, revision=config.target.revision)
        self._inbox = Inbox(ray.util.get_node_ip_address())
        info: ModelInfo = await engine.info.remote()
        self._served = Served(
            name=config.model,
            vocab_size=info.vocab_size,
            max_context=min(info.max_context, info.num_pages * info.page_size),
            created=int(time.time()),
            max_gamma=config.speculation.max_gamma,
            encodes=info.decoder_start is not None,
        )
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._registry = Registry()
        resumed = self._registry.counter("requests_resumed_total")
        self._replicas = Replicas(
            engine, board, self._inbox, own=self._replica, resumed=lambda: resumed.add(1)
        )
        self._reports = asyncio.create_task(report_for_ever(board, self._report))

    def __serve_build_asgi_app__(self) -> Any:
        return build_app(self._replicas, self._text, self._served, self._config, self._registry)

    async def __del__(self) -> None:
        if hasattr(self, "_reports"):
            self._reports.cancel()
            self._replicas.close()

    def _report(self) -> Report:
        return Report(self._replica, GATEWAY, None, self._registry.snapshot())
