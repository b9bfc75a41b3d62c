"""An engine in the event loop of its process: workers, coordinator, and what watches them.

Knows neither gateways nor the board.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import ray

from specserve.cluster.gauges import Gauges
from specserve.cluster.group import WorkerGroup
from specserve.cluster.health import EngineHealth
from specserve.cluster.node_drain import DrainWatch
from specserve.cluster.placement import Bundle
from specserve.cluster.remote import RemoteDrafter
from specserve.config.tree import Config
from specserve.engine import Coordinator
from specserve.engine.trace import TraceJournal
from specserve.errors import Overloaded, SpecserveError
from specserve.metrics import Registry, Snapshot
from specserve.types import Chunk

DISPLACED = "the queue is full, and this client has most of it; try again later"
Emit = Callable[[Sequence[Chunk]], None]


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
    ) -> None:
        self.group, self.coordinator, self.journal = group, coordinator, journal
        self._gauges, self._registry = gauges, registry
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
    ) -> RunningEngine:
        """Start the workers and begin with rounds.

        `emit` gets the chunks of each round, `on_displaced` the id of a waiting sequence that gives
        its place to another client's, and the error that it ends with.
        """
        registry = Registry()
        journal = TraceJournal(registry)
        group = await WorkerGroup.start(
            config, wanted, journal.record_exchange, journal.record_event
        )
        coordinator = Coordinator(
            group.target,
            group.drafter,
            info=group.info,
            limits=config.limits,
            speculation=config.speculation,
            emit=emit,
            draft_context=group.draft_context,
            report=journal.record_round,
            drafts_prompts=group.drafts_prompts,
            remote_workers=isinstance(group.drafter, RemoteDrafter),
            on_displaced=lambda seq_id: on_displaced(seq_id, Overloaded(DISPLACED)),
        )
        return cls(config, group, coordinator, journal, Gauges(registry, replica), registry)

    def snapshot(self) -> Snapshot:
        """Return the metrics of this moment."""
        self._gauges.observe(self.coordinator, self.group)
        return self._registry.snapshot()

    async def close(self) -> None:
        """End the rounds and the workers."""
        self._drain_checks.cancel()
        self.coordinator.close()
        await asyncio.wait([self._rounds], timeout=5.0)
        await self.group.close()
