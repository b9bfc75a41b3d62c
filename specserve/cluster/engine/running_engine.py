"""An engine in the event loop of its process: workers, coordinator, and what watches them.

Knows neither gateways nor the board.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence

import ray

from specserve.cluster.engine.gauges import Gauges
from specserve.cluster.engine.group import WorkerGroup
from specserve.cluster.engine.health import EngineHealth
from specserve.cluster.engine.node_drain import DrainWatch
from specserve.cluster.engine.records import EngineRecords
from specserve.cluster.engine.supervisor import Join
from specserve.cluster.placement import Bundle
from specserve.config.tree import Config
from specserve.engine import Coordinator
from specserve.engine.first_tokens import FirstTokenRecord
from specserve.errors import Overloaded, SpecserveError
from specserve.metrics import Registry, Snapshot
from specserve.types import Chunk, Request

DISPLACED = "the queue is full, and this client has most of it; try again later"
Emit = Callable[[Sequence[Chunk]], None]
Displace = Callable[[int, SpecserveError], None]


class RunningEngine:
    """A coordinator in this process, and its workers in the placement group of this actor."""

    def __init__(
        self,
        config: Config,
        group: WorkerGroup,
        coordinator: Coordinator,
        records: EngineRecords,
        gauges: Gauges,
        registry: Registry,
        *,
        start_seconds: float = 0.0,
    ) -> None:
        self.group, self.coordinator, self.records = group, coordinator, records
        self._gauges, self._registry = gauges, registry
        self.start_seconds = start_seconds
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
        on_displaced: Displace,
        joins: Sequence[Join] = (),
    ) -> RunningEngine:
        """Start the workers and begin with rounds.

        `emit` gets the chunks of each round, `on_displaced` the id of a waiting sequence that gives
        its place to another client's, and the error that it ends with. `joins` link to shared
        drafters.
        """
        started_at, registry = time.monotonic(), Registry()
        records = EngineRecords(registry, replica=replica, started=lambda: _started(coordinator))
        group = await WorkerGroup.start(
            config, wanted, records.record_exchange, records.journal.record_event, joins
        )
        target_s = config.replicas.target_ttft_s
        if target_s is not None:
            records.add_first_tokens(FirstTokenRecord(target_s, group.info.curve))
        coordinator = _coordinator(config, group, records, emit, on_displaced)
        return cls(
            config,
            group,
            coordinator,
            records,
            Gauges(registry, replica),
            registry,
            start_seconds=time.monotonic() - started_at,
        )

    def submit(self, request: Request) -> int:
        """Queue the request and return its sequence's id, or raise if it cannot be served."""
        seq_id = self.coordinator.submit(request)
        if self.group.expect is not None:
            self.group.expect(seq_id, request)
        load = self.coordinator.scheduler.num_sequences
        self.records.begin(seq_id, request, load=load)
        return seq_id

    def snapshot(self) -> Snapshot:
        """Return the metrics of this moment."""
        self._gauges.observe(self.coordinator, self.group)
        if self.records.first_tokens is not None:
            self._gauges.observe_load_limit(self.records.first_tokens)
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


def _coordinator(
    config: Config, group: WorkerGroup, records: EngineRecords, emit: Emit, on_displaced: Displace
) -> Coordinator:
    """Return the coordinator of these workers, whose requests and rounds are recorded."""

    def emit_observed(chunks: Sequence[Chunk]) -> None:
        records.observe(chunks)
        emit(chunks)

    def displace(seq_id: int) -> None:
        records.drop(seq_id)
        on_displaced(seq_id, Overloaded(DISPLACED))

    return Coordinator(
        group.target,
        group.drafter,
        info=group.info,
        limits=config.limits,
        speculation=config.speculation,
        emit=emit_observed,
        draft_context=group.draft_context,
        report=records.record_round,
        drafts_prompts=group.drafts_prompts,
        remote_workers=bool(group.remote_drafters),
        on_displaced=displace,
    )
