"""Serve deployment of a draft pool: each replica is a drafter on a device of its own.

Engines join by a Serve call that lasts as long as they stay. So Serve spreads them over the
devices, and a call that ends, for whatever reason, is an engine that has left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from specserve.api.service import PoolStatus
from specserve.cluster.board.reporting import report_forever
from specserve.cluster.board.status_board import POOL, PoolAnswer, ReplicaReport
from specserve.cluster.engine.process_state import process_runs_on
from specserve.cluster.engine.worker_host import WorkerPlace, WorkerReady, WorkerSite
from specserve.cluster.logs import join_serve
from specserve.cluster.placement import FIRST_GPU
from specserve.config.sections import MAX_BATCH_TOKENS, TargetConfig
from specserve.config.tree import Config
from specserve.errors import WorkerLost, first_line
from specserve.features.draft_pools.autoscaling import DRAFTS_METRIC, ENGINES_METRIC
from specserve.features.draft_pools.balance import HealthChecks, PoolBalance
from specserve.features.draft_pools.link import JoiningEngine
from specserve.features.draft_pools.sharers import engines_per_draft
from specserve.metrics import Registry

if TYPE_CHECKING:
    from specserve.features.draft_pools.worker import PoolWorker

log = logging.getLogger(__name__)

END_TIMEOUT_S = 2.0
"""Time for the drafter to end its batch when the replica ends."""


def pool_deployment_name(config: Config) -> str:
    """Return the name by which engines find their pool."""
    return f"DraftPool-{config.draft.pool.name}"


def pool_draft_config(config: Config, *, has_gpu: bool) -> Config:
    """Return the config by which a device's draft is opened: with room for all its engines."""
    engines, draft, limits, cache = (
        engines_per_draft(config),
        config.draft,
        config.limits,
        config.cache,
    )
    on_gpu = draft.device if draft.device == "auto" else FIRST_GPU
    device = on_gpu if has_gpu and draft.device != "cpu" else "cpu"
    return replace(
        config,
        draft=replace(draft, device=device),
        limits=replace(
            limits,
            max_running=limits.max_running * engines,
            max_batch_tokens=(limits.max_batch_tokens or MAX_BATCH_TOKENS) * engines,
        ),
        cache=replace(cache, pages=None if cache.pages is None else cache.pages * engines),
    )


def _own_site() -> WorkerSite:
    """Return where this replica runs, and with what GPUs."""
    context = ray.get_runtime_context()
    return WorkerSite(
        context.get_node_id(),
        ray.util.get_node_ip_address(),
        tuple(context.get_accelerator_ids().get("GPU", ())),
    )


class LoadMeter:
    """The load of a pool's worker between two readings, as a share of the time."""

    def __init__(self, worker: PoolWorker, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker, self._clock = worker, clock
        self._last_time, self._last_seconds = clock(), worker.load.seconds

    def read(self) -> float:
        """Return the load since the last reading."""
        now, seconds = self._clock(), self._worker.load.seconds
        elapsed, self._last_time = max(now - self._last_time, 1e-9), now
        spent, self._last_seconds = seconds - self._last_seconds, seconds
        return spent / elapsed


class DraftPool:
    """A replica of the pool: a drafter in a thread of this process, and the engines' calls."""

    # Serve awaits the constructor; type checkers do not know that.
    async def __init__(  # type: ignore[misc]
        self, config: Config, board: Any, other_targets: Sequence[TargetConfig] = ()
    ) -> None:
        """Listen for engines of the config's target and of the others.

        The drafter is opened when the first one joins.
        """
        # Imported here, since a process that only deploys it needs no torch.
        from specserve.features.draft_pools.opening import open_pooled_drafter
        from specserve.features.draft_pools.worker import PoolWorker

        join_serve(config)
        site = _own_site()
        own = pool_draft_config(config, has_gpu=bool(site.accelerators))
        self._site, self._pool = site, str(config.draft.pool.name)
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._worker = PoolWorker(
            lambda target: open_pooled_drafter(own, site, target, other_targets),
            site.address,
            page_size=config.cache.page_size,
            max_places=config.limits.max_running,
        )
        self._thread = threading.Thread(target=self._worker.run, name="draft-pool", daemon=True)
        self._thread.start()
        self._registry = Registry()
        self._last_time = time.monotonic()
        self._last_busy = dict(self._worker.busy_seconds)
        self._last_counts = (0, 0)
        self._target_busy = config.draft.pool.target_busy
        # Reports and the autoscaler look at different times.
        self._reported_load, self._scaling_load = (LoadMeter(self._worker) for _ in range(2))
        self._balance = PoolBalance(self._replica, time.monotonic)
        self._checks = HealthChecks(time.monotonic)
        self._devices: Mapping[str, int] = {}  # engines of each device, as the board knows them
        self._reports = asyncio.create_task(report_forever(board, self._report, self._on_answer))
        log.info("draft pool %s: replica %s listens", self._pool, self._replica)

    async def join(self, engine: JoiningEngine) -> AsyncGenerator[WorkerReady, None]:
        """Admit an engine until it cancels the call or dies; yield once, when loaded.

        Raises VersionMismatch if it runs another release.
        """
        engine.require_same_version()
        is_running = partial(process_runs_on, engine.node, engine.pid)
        members = self._worker.membership(engine.public_key, engine.target, is_running)
        async with aclosing(members) as membership:
            async for opened in membership:  # a second time to ask it to move
                place = WorkerPlace(
                    self._site.node, os.getpid(), opened.device, self._site.accelerators
                )
                yield WorkerReady(self._worker.address, place, opened.context, opened.num_pages)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics that Serve polls and passes to the autoscaling policy."""
        return {
            DRAFTS_METRIC: self._scaling_load.read() / self._target_busy,
            ENGINES_METRIC: float(self._worker.num_engines),
        }

    def check_health(self) -> None:
        """Raise WorkerLost when the drafter has ended; Serve then replaces this replica."""
        self._checks.note()
        if self._worker.ended.done():
            error = self._worker.ended.exception()
            why = "it has stopped" if error is None else first_line(error)
            raise WorkerLost(f"the draft pool has ended: {why}")

    async def __del__(self) -> None:
        if not hasattr(self, "_reports"):
            return
        self._reports.cancel()
        self._worker.stop()
        await asyncio.to_thread(self._thread.join, END_TIMEOUT_S)

    def _report(self) -> ReplicaReport:
        now, busy = time.monotonic(), dict(self._worker.busy_seconds)
        elapsed, self._last_time = max(now - self._last_time, 1e-9), now
        labels = self._pool, self._replica
        for work, seconds in busy.items():
            share = min(1.0, (seconds - self._last_busy[work]) / elapsed)
            self._registry.gauge("pool_busy_fraction").set(share, *labels, work)
        self._last_busy = busy
        self._registry.gauge("pool_engines").set(self._worker.num_engines, *labels)
        counts = self._worker.num_batches, self._worker.num_rounds
        for name, count, last in zip(("batches", "rounds"), counts, self._last_counts, strict=True):
            self._registry.counter(f"pool_{name}_total").add(count - last, self._pool)
        self._last_counts = counts
        load = self._reported_load.read()
        self._registry.gauge("pool_load").set(load, *labels)
        state: PoolStatus | None = PoolStatus(self._pool, 1, self._worker.num_engines, load)
        if self._checks.have_ended():  # no engine is to move here, as one would to restore balance
            state = None
        return ReplicaReport(self._replica, POOL, None, self._registry.snapshot(), pool=state)

    def _on_answer(self, answer: object) -> None:
        """Take the board's answer to a report; None while the board is away."""
        is_leaving = self._checks.have_ended()
        if isinstance(answer, PoolAnswer):
            self._devices = answer.engines
        elif not is_leaving:
            return
        moving = self._balance.engines_to_move(
            self._worker.engines, self._devices, is_leaving=is_leaving
        )
        if moving:
            log.info("%d engines are to move to other devices of the pool", len(moving))
            self._worker.ask_to_move(moving)
