"""Metrics of an engine: rates cover the time since the last reading, totals never count twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specserve.cluster.engine.gauges import Gauges
from specserve.cluster.engine.pass_watch import RankTimes
from specserve.metrics import Registry, merge, render


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, list[float]]:
    now = [100.0]
    monkeypatch.setattr("specserve.cluster.engine.gauges.time.monotonic", lambda: now[0])
    scheduler = SimpleNamespace(running=[1, 2, 3], waiting=[4], num_preempted=5)
    coordinator = SimpleNamespace(scheduler=scheduler, pacer=SimpleNamespace(gamma=6))
    target = SimpleNamespace(
        pages_used=25,
        busy_seconds=10.0,
        prefix_queries=40,
        prefix_hits=32,
        watch=SimpleNamespace(ranks={}),
    )
    drafter = SimpleNamespace(pages_used=5, busy_seconds=1.0)
    ready = SimpleNamespace(num_pages=50)
    group = SimpleNamespace(
        target=target,
        drafter=drafter,
        remote_drafters=(drafter,),
        draft_workers=(SimpleNamespace(ready=ready),),
        info=SimpleNamespace(num_pages=100),
        restarts={"target": 2, "draft": 0},
        avoided_devices={"a device": ()},
    )
    return coordinator, group, now


def test_a_busy_share_is_of_the_time_since_the_last_reading(
    parts: tuple[Any, Any, list[float]],
) -> None:
    coordinator, group, now = parts
    registry = Registry()
    gauges = Gauges(registry, "a1")
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
    gauges = Gauges(registry, "a1")
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
    group.drafter, group.draft_workers = None, ()
    registry = Registry()
    Gauges(registry, "a1").observe(coordinator, group)
    samples = registry.snapshot().samples
    assert samples["gamma"][()][0] == 0
    assert list(samples["kv_cache_usage_perc"]) == [("target",)]


def test_each_engine_and_rank_has_series_of_its_own_beside_those_of_the_application(
    parts: tuple[Any, Any, list[float]],
) -> None:
    coordinator, group, now = parts
    registries = {name: Registry() for name in ("a1", "b2")}
    gauges = {name: Gauges(registry, name) for name, registry in registries.items()}
    group.target.watch.ranks = {0: RankTimes(3.0, 2.0, 10), 1: RankTimes(2.0, 2.0, 10)}
    now[0] = 104.0
    gauges["a1"].observe(coordinator, group)
    coordinator.scheduler.running.append(5)
    gauges["b2"].observe(coordinator, group)
    lines = render(merge(registry.snapshot() for registry in registries.values())).splitlines()
    for line in (
        "num_requests_running 7",
        "avoided_devices 2",
        'engine_num_requests_running{replica="a1"} 3',
        'engine_num_requests_running{replica="b2"} 4',
        'engine_num_requests_waiting{replica="a1"} 1',
        'engine_kv_cache_usage_perc{replica="b2",role="draft"} 0.1',
        f'engine_prefix_cache_queries{{replica="a1"}} {group.target.prefix_queries}',
        f'engine_prefix_cache_hits{{replica="b2"}} {group.target.prefix_hits}',
        'engine_device_busy_fraction{replica="a1",role="draft"} 0.25',
        'rank_busy_fraction{replica="a1",rank="0"} 0.75',
        'rank_busy_fraction{replica="a1",rank="1"} 0.5',
        'rank_pass_seconds{replica="b2",rank="1"} 0.2',
    ):
        assert f"specserve_{line}" in lines


def test_a_rank_without_passes_keeps_the_time_of_its_last_ones(
    parts: tuple[Any, Any, list[float]],
) -> None:
    coordinator, group, now = parts
    registry = Registry()
    gauges = Gauges(registry, "a1")
    group.target.watch.ranks = {0: RankTimes(3.0, 2.0, 10)}
    for _ in range(2):
        now[0] += 4.0
        gauges.observe(coordinator, group)
    samples = registry.snapshot().samples
    assert samples["rank_busy_fraction"] == {("a1", "0"): (0.0, 1.0)}
    assert samples["rank_pass_seconds"] == {("a1", "0"): (0.2, 1.0)}


def test_series_of_an_engine_that_is_gone_go_with_it(parts: tuple[Any, Any, list[float]]) -> None:
    coordinator, group, _ = parts
    registry = Registry()
    Gauges(registry, "a1").observe(coordinator, group)
    left = render(registry.snapshot().lasting())
    assert "specserve_preemptions_total 5" in left
    assert "a1" not in left


def test_the_devices_that_draft_for_an_engine_are_one_role(
    parts: tuple[Any, Any, list[float]],
) -> None:
    coordinator, group, now = parts
    other = SimpleNamespace(pages_used=15, busy_seconds=0.0)
    group.remote_drafters += (other,)
    group.draft_workers *= 2
    registry = Registry()
    gauges = Gauges(registry, "a1")
    gauges.observe(coordinator, group)
    other.busy_seconds += 3.0
    now[0] += 2.0
    gauges.observe(coordinator, group)
    samples = registry.snapshot().samples
    assert samples["kv_cache_usage_perc"]["draft",] == (0.2, 1.0)
    assert samples["device_busy_fraction"]["draft",] == (0.75, 1.0)
