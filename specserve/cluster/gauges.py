"""Record gauges and totals of an engine once a second: queues, pages and busy devices."""

from __future__ import annotations

import time

from specserve.cluster.group import WorkerGroup
from specserve.cluster.remote import PushedProposals
from specserve.engine import Coordinator
from specserve.metrics import Registry


class Gauges:
    """Metrics read from the coordinator and the workers, with the last reading for differences."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._last_time = time.monotonic()
        self._last_busy = {"target": 0.0, "draft": 0.0}
        self._last_counts: dict[str, int] = {}

    def observe(self, coordinator: Coordinator, group: WorkerGroup) -> None:
        registry, scheduler = self._registry, coordinator.scheduler
        registry.gauge("num_requests_running").set(len(scheduler.running))
        registry.gauge("num_requests_waiting").set(len(scheduler.waiting))
        registry.gauge("gamma").set(coordinator.pacer.gamma if group.drafter is not None else 0)
        self._add_since_last("preemptions_total", scheduler.num_preempted)
        for role, restarts in group.restarts.items():
            self._add_since_last("worker_restarts_total", restarts, role)
        self._add_since_last("prefix_cache_queries_total", group.target.prefix_queries)
        self._add_since_last("prefix_cache_hits_total", group.target.prefix_hits)
        registry.gauge("kv_cache_usage_perc").set(
            group.target.pages_used / group.info.num_pages, "target"
        )
        busy = {"target": group.target.busy_seconds}
        if (
            group.draft_worker is not None
            and group.drafter is not None
            and not isinstance(group.drafter, PushedProposals)
        ):
            if group.draft_worker.ready.num_pages:
                registry.gauge("kv_cache_usage_perc").set(
                    group.drafter.pages_used / group.draft_worker.ready.num_pages, "draft"
                )
            busy["draft"] = group.drafter.busy_seconds
        self._set_busy_fraction(busy)

    def _set_busy_fraction(self, seconds: dict[str, float]) -> None:
        now = time.monotonic()
        for role, busy in seconds.items():
            share = (busy - self._last_busy[role]) / max(now - self._last_time, 1e-9)
            self._registry.gauge("device_busy_fraction").set(min(1.0, share), role)
            self._last_busy[role] = busy
        self._last_time = now

    def _add_since_last(self, name: str, total: int, label: str = "") -> None:
        self._registry.counter(name).add(
            total - self._last_counts.get(name + label, 0), *([label] if label else [])
        )
        self._last_counts[name + label] = total
