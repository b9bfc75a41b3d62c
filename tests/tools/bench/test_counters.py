"""Server counters, read back from /metrics."""

from __future__ import annotations

import pytest

from specserve.metrics import Registry, merge, render
from specserve.tools.bench.counters import Counters, ServerSide


def _read(registry: Registry) -> Counters:
    return Counters.parse(render(registry.snapshot()), "any")


def test_counts_before_the_load_are_subtracted() -> None:
    registry = Registry()
    registry.histogram("round_seconds").observe(9.0)
    registry.counter("preemptions_total").add(4)
    before = _read(registry)
    for seconds in (0.02, 0.04):
        registry.histogram("round_seconds").observe(seconds)
    registry.histogram("verify_seconds").observe(0.01)
    registry.counter("preemptions_total").add(2)
    server = ServerSide.from_counters(_read(registry).since(before))
    assert (server.rounds, server.preemptions) == (2, 2)
    assert server.round_s == pytest.approx(0.03)
    assert server.verify_s == pytest.approx(0.01)
    assert server.draft_s is None


def test_counts_of_other_models_are_left_out() -> None:
    registry, other, common = Registry(), Registry(), Registry()
    registry.counter("spec_decode_num_accepted_tokens_per_pos_total").add(3, "0")
    other.counter("spec_decode_num_accepted_tokens_per_pos_total").add(5, "0")
    common.counter("preemptions_total").add(2)
    both = merge(
        (
            registry.snapshot().of_model("small"),
            other.snapshot().of_model("large"),
            common.snapshot(),
        )
    )
    counters = Counters.parse(render(both), "small")
    assert counters.by_label("spec_decode_num_accepted_tokens_per_pos_total") == {"0": 3.0}
    assert counters.total("preemptions_total") == 2, "what no model is named for is all models'"


def test_positions_come_in_the_order_of_numbers() -> None:
    registry = Registry()
    for position in range(12):
        registry.counter("spec_decode_num_accepted_tokens_per_pos_total").add(
            100 - position, str(position)
        )
    assert ServerSide.from_counters(_read(registry)).accepted_per_position == tuple(
        range(100, 88, -1)
    )


def test_rates_are_shares_of_what_was_counted() -> None:
    registry = Registry()
    assert ServerSide.from_counters(_read(registry)).anticipation_hit_rate is None
    registry.counter("anticipation_hits_total").add(3)
    registry.counter("anticipation_misses_total").add(1)
    registry.counter("prefix_cache_queries_total").add(10)
    registry.counter("prefix_cache_hits_total").add(4)
    server = ServerSide.from_counters(_read(registry))
    assert (server.anticipation_hit_rate, server.prefix_cache_hit_rate) == (0.75, 0.4)


def test_work_changes_with_rounds_and_not_with_gauges() -> None:
    registry = Registry()
    before = _read(registry).work
    registry.gauge("gamma").set(3.0)
    assert _read(registry).work == before
    registry.histogram("round_seconds").observe(0.5)
    assert _read(registry).work != before


def test_other_text_and_other_metrics_are_skipped() -> None:
    text = (
        "# HELP x y\nhttp_requests_total 4\nspecserve_preemptions_total 2\n"
        "<html>\nspecserve_broken\n"
    )
    assert Counters.parse(text, "any").samples == {("preemptions_total", ""): 2.0}
