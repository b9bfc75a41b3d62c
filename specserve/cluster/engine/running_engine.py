"""An engine in the event loop of its process: workers, coordinator, and what watches them.

Knows neither gateways nor the board.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import ray

from specserve.cluster.engine.gauges import Gauges
from specserve.cluster.engine.group import WorkerGroup
from specserve.cluster.engine.health import EngineHealth
from specserve.cluster.engine.node_drain import DrainWatch
from specserve.cluster.engine.remote import RemoteDrafter
from specserve.cluster.engine.supervisor import Join
from specserve.cluster.placement import Bundle
from specserve.config.tree import Config
from specserve.engine import Coordinator
from specserve.engine.first_tokens import FirstTokenRecord
from specserve.engine.trace import Exchange, Round, TraceJournal
from specserve.errors import Overloaded, SpecserveError
from specserve.metrics import Registry, Snapshot
from specserve.tracing import EngineSpans, tracer_from_environment
from specserve.types import Chunk, Request

DISPLACED = "the queue is full, and this client has most of it; try again later"
Emit = Callable[[Sequence[Chunk]], None]


class RequestObserver(Protocol):
    """A record of requests, from their submission to their last chunk."""

    def begin(self, seq_id: int, request: Request, *, load: int) -> None:
        """Take a new request, which is one of `load` that the engine has now."""
        ...

    def observe(self, chunks: Sequence[Chunk]) -> None: ...

    def drop(self, seq_id: int) -> None:
        """Leave out a sequence that gets no chunk."""
        ...


class RunningEngine:
    """A coordinator in this process, and its workers in the placement group of this actor."""

    def __init__(
        self,
        config: Config,
        group: WorkerGroup,
        coordinator: Coordinator,
        journal: TraceJournal,
        gauges: Gauges,
        registry: Registry,
        *,
        first_tokens: FirstTokenRecord | None = None,
        observers: Sequence[RequestObserver] = (),
        start_seconds: float = 0.0,
    ) -> None:
        self.group, self.coordinator, self.journal = group, coordinator, journal
        self._gauges, self._registry = gauges, registry
        # None if no target for first tokens is set
        self.first_tokens, self.start_seconds = first_tokens, start_seconds
        self._observers = observers
        self._rounds = asyncio.create_task(coordinator.run())
        node = ray.get_runtime_context().get_node_id()
        drain = DrainWatch(lambda: group.places, node)
        self._drain_checks = asyncio.create_task(drain.run())
        self.health = EngineHealth(
            coordinator,
            group,
            self._rounds,
            round_deadline_s=config.faults.round_deadline_s,
            drain=drain,
        )

    @classmethod
    async def start(
        cls,
        config: Config,
        wanted: Sequence[Bundle],
        *,
        replica: str,
        emit: Emit,
        on_displaced: Callable[[int, SpecserveError], None],
        join: Join | None = None,
    ) -> RunningEngine:
        """Start the workers and begin with rounds.

        `emit` gets the chunks of each round, `on_displaced` the id of a waiting sequence that gives
        its place to another client's, and the error that it ends with. `join` links to a shared
        drafter.
        """
        started_at, registry = time.monotonic(), Registry()
        journal = TraceJournal(registry)
        tracer = tracer_from_environment()
        spans = (
            None
            if tracer is None
            else EngineSpans(tracer, replica=replica, started=lambda: _started(coordinator))
        )

        def record_exchange(exchange: Exchange) -> None:
            journal.record_exchange(exchange)
            if spans is not None:
                seconds_ago = time.perf_counter() - exchange.answered_at
                spans.record_exchange(exchange.role, exchange.busy_seconds, seconds_ago)

        group = await WorkerGroup.start(config, wanted, record_exchange, journal.record_event, join)
        target_s = config.replicas.target_ttft_s
        first_tokens = None if target_s is None else FirstTokenRecord(target_s, group.info.curve)
        observers: list[RequestObserver] = [one for one in (first_tokens, spans) if one is not None]

        def emit_observed(chunks: Sequence[Chunk]) -> None:
            for observer in observers:
                observer.observe(chunks)
            emit(chunks)

        def report(done: Round) -> None:
            journal.record_round(done)
            if spans is not None:
                spans.record_round(time.perf_counter() - done.start)

        def displace(seq_id: int) -> None:
            for observer in observers:
                observer.drop(seq_id)
            on_displaced(seq_id, Overloaded(DISPLACED))

        coordinator = Coordinator(
            group.target,
            group.drafter,
            info=group.info,
            limits=config.limits,
            speculation=config.speculation,
            emit=emit_observed,
            draft_context=group.draft_context,
            report=report,
            drafts_prompts=group.drafts_prompts,
            remote_workers=isinstance(group.drafter, RemoteDrafter),
            on_displaced=displace,
        )
        return cls(
            config,
            group,
            coordinator,
            journal,
            Gauges(registry, replica),
            registry,
            first_tokens=first_tokens,
            observers=observers,
            start_seconds=time.monotonic() - started_at,
        )

    def submit(self, request: Request) -> int:
        """Queue the request and return its sequence's id, or raise if it cannot be served."""
        seq_id = self.coordinator.submit(request)
        load = self.coordinator.scheduler.num_sequences
        for observer in self._observers:
            observer.begin(seq_id, request, load=load)
        return seq_id

    def snapshot(self) -> Snapshot:
        """Return the metrics of this moment."""
        self._gauges.observe(self.coordinator, self.group)
        if self.first_tokens is not None:
            self._gauges.observe_load_limit(self.first_tokens)
        return self._registry.snapshot()

    async def close(self) -> None:
        """End the rounds and the workers."""
        self._drain_checks.cancel()
        self.coordinator.close()
        await asyncio.wait([self._rounds], timeout=5.0)
        await self.group.close()


def _started(coordinator: Coordinator) -> Collection[int]:
    """Return the ids of running sequences that had a pass of the target."""
    running = coordinator.scheduler.running
    return {sequence.seq_id for sequence in running if sequence.target_cached}
