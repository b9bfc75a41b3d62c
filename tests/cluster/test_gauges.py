"""Metrics of an engine: rates cover the time since the last reading, totals never count twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specserve.cluster.gauges import Gauges
from specserve.metrics import Registry


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, list[float]]:
    now = [100.0]
    monkeypatch.setattr("specserve.cluster.gauges.time.monotonic", lambda: now[0])
    scheduler = SimpleNamespace(running=[1, 2, 3], waiting=[4], num_preempted=5)
    coordinator = SimpleNamespace(scheduler=scheduler, pacer=SimpleNamespace(gamma=6))
    target = SimpleNamespace(pages_used=25, busy_seconds=10.0, prefix_queries=40, prefix_hits=32)
    drafter = SimpleNamespace(pages_used=5, busy_seconds=1.0)
    ready = SimpleNamespace(num_pages=50)
    group = SimpleNamespace(
        target=target,
        drafter=drafter,
        draft_worker=SimpleNamespace(ready=ready),
        info=SimpleNamespace(num_pages=100),
        restarts={"target": 2, "draft": 0},
    )
    return coordinator, group, now


def test_a_busy_share_is_of_the_time_since_the_last_reading(
    parts: tuple[Any, Any, list[float]],
) -> None:
    coordinator, group, now = parts
    registry = Registry()
    gauges = Gauges(registry)
    now[0] = 120.0
    gauges.observe(coordinator, group)
    group.target.busy_seconds += 3.0
    now[0] = 124.0
    gauges.observe(coordinator, group)
    samples = registry.snapshot().samples
    assert samples["device_busy_fraction"] == {("target",): (0.75, 1.0), ("draft",): (0.0, 1.0)}
    assert samples["kv_cache_usage_perc"] == {("target",): (0.25, 1.0), ("draft",): (0.1, 1.0)}
    assert (
        samples["num_requests_running"][()][0],
        samples["num_requests_waiting"][()][0],
        samples["gamma"][()][0],
    ) == (3, 1, 6)


def test_totals_of_others_are_counted_once(parts: tuple[Any, Any, list[float]]) -> None:
    coordinator, group, _ = parts
    registry = Registry()
    gauges = Gauges(registry)
    for _ in range(3):
        gauges.observe(coordinator, group)
    group.target.prefix_hits += 16
    gauges.observe(coordinator, group)
    samples = registry.snapshot().samples
    assert samples["preemptions_total"] == {(): (5.0,)}
    assert samples["prefix_cache_queries_total"] == {(): (40.0,)}
    assert samples["prefix_cache_hits_total"] == {(): (48.0,)}
    assert samples["worker_restarts_total"] == {("target",): (2.0,), ("draft",): (0.0,)}


def test_without_a_drafter_gamma_is_zero(parts: tuple[Any, Any, list[float]]) -> None:
    coordinator, group, _ = parts
    group.drafter = group.draft_worker = None
    registry = Registry()
    Gauges(registry).observe(coordinator, group)
    samples = registry.snapshot().samples
    assert samples["gamma"][()][0] == 0
    assert list(samples["kv_cache_usage_perc"]) == [("target",)]
