"""Record gauges and totals of an engine once a second: queues, pages and busy devices."""

from __future__ import annotations

import time

from specserve.cluster.engine.group import WorkerGroup
from specserve.cluster.engine.pass_watch import RankTimes
from specserve.engine import Coordinator
from specserve.engine.first_tokens import FirstTokenRecord
from specserve.metrics import Registry


class Gauges:
    """Metrics read from the coordinator and the workers, with the last reading for differences.

    The application's have no `replica`; metrics of this engine and of its ranks have.
    """

    def __init__(self, registry: Registry, replica: str) -> None:
        self._registry, self._replica = registry, replica
        self._last_time = time.monotonic()
        self._last_busy = {"target": 0.0, "draft": 0.0}
        self._last_ranks: dict[int, RankTimes] = {}
        self._last_counts: dict[str, int] = {}

    def observe(self, coordinator: Coordinator, group: WorkerGroup) -> None:
        scheduler = coordinator.scheduler
        self._set_both("num_requests_running", len(scheduler.running))
        self._set_both("num_requests_waiting", len(scheduler.waiting))
        self._registry.gauge("gamma").set(
            coordinator.pacer.gamma if group.drafter is not None else 0
        )
        self._registry.gauge("avoided_devices").set(len(group.avoided_devices))
        self._add_since_last("preemptions_total", scheduler.num_preempted)
        for role, restarts in group.restarts.items():
            self._add_since_last("worker_restarts_total", restarts, role)
        self._set_prefix_counts("queries", group.target.prefix_queries)
        self._set_prefix_counts("hits", group.target.prefix_hits)
        self._set_both(
            "kv_cache_usage_perc", group.target.pages_used / group.info.num_pages, "target"
        )
        busy = {"target": group.target.busy_seconds}
        if group.draft_workers:
            drafters = group.remote_drafters
            if num_pages := sum(worker.ready.num_pages for worker in group.draft_workers):
                pages_used = sum(drafter.pages_used for drafter in drafters)
                self._set_both("kv_cache_usage_perc", pages_used / num_pages, "draft")
            busy["draft"] = sum(drafter.busy_seconds for drafter in drafters) / len(drafters)
        now = time.monotonic()
        elapsed, self._last_time = max(now - self._last_time, 1e-9), now
        self._set_busy_fraction(busy, elapsed)
        self._set_ranks(group.target.watch.ranks, elapsed)

    def observe_load_limit(self, first_tokens: FirstTokenRecord) -> None:
        """Set the load up to which first tokens are on time; 0 while none was too late."""
        self._registry.gauge("engine_load_limit").set(first_tokens.limit or 0.0, self._replica)

    def _set_both(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge of the application, and that of this engine beside it."""
        self._registry.gauge(name).set(value, *labels)
        self._registry.gauge(f"engine_{name}").set(value, self._replica, *labels)

    def _set_prefix_counts(self, name: str, total: int) -> None:
        """Count tokens for the application, and set this engine's gauges, which end with it."""
        self._add_since_last(f"prefix_cache_{name}_total", total)
        self._registry.gauge(f"engine_prefix_cache_{name}").set(total, self._replica)

    def _set_busy_fraction(self, seconds: dict[str, float], elapsed: float) -> None:
        for role, busy in seconds.items():
            share = (busy - self._last_busy[role]) / elapsed
            self._set_both("device_busy_fraction", min(1.0, share), role)
            self._last_busy[role] = busy

    def _set_ranks(self, ranks: dict[int, RankTimes], elapsed: float) -> None:
        for rank, times in ranks.items():
            labels = self._replica, str(rank)
            new = times.since(self._last_ranks.get(rank, RankTimes()))
            self._last_ranks[rank] = times
            self._registry.gauge("rank_busy_fraction").set(
                min(1.0, new.busy_seconds / elapsed), *labels
            )
            if new.num_passes:
                self._registry.gauge("rank_pass_seconds").set(
                    new.pass_seconds / new.num_passes, *labels
                )

    def _add_since_last(self, name: str, total: int, label: str = "") -> None:
        self._registry.counter(name).add(
            total - self._last_counts.get(name + label, 0), *([label] if label else [])
        )
        self._last_counts[name + label] = total
