"""Our snapshots as counters and gauges of Ray."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from ray.serve import metrics as serve_metrics

from specserve.features.ray_serve_llm.metrics import RayMetrics
from specserve.metrics import Registry

Key = tuple[str, tuple[tuple[str, str], ...]]


class FakeMetrics:
    """Ray's metrics, which refuse labels that Serve sets, as Serve's do."""

    def __init__(self, name: str, *, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        assert not {"application", "deployment", "replica"} & {*tag_keys}
        self.name, self.tag_keys = name, tag_keys

    def inc(self, amount: float, tags: Mapping[str, str]) -> None:
        values[self._key(tags)] = values.get(self._key(tags), 0.0) + amount

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        values[self._key(tags)] = value

    def _key(self, tags: Mapping[str, str]) -> Key:
        assert tuple(tags) == self.tag_keys
        return self.name, tuple(tags.items())


values: dict[Key, float] = {}


def test_totals_go_on_after_a_sleep_and_gauges_have_the_last_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_metrics, "Counter", FakeMetrics)
    monkeypatch.setattr(serve_metrics, "Gauge", FakeMetrics)
    values.clear()
    exported = RayMetrics()
    for totals in ((3, 2), (4,)):  # with each registry an engine starts
        registry = Registry()
        for total in totals:
            registry.counter("generation_tokens_total").add(total)
            registry.counter("spec_decode_num_accepted_tokens_per_pos_total").add(1, "0")
            registry.histogram("round_seconds").observe(0.5)
            registry.gauge("engine_load_limit").set(total, "replica-7")
            exported.export(registry.snapshot())
    assert values["specserve_generation_tokens", ()] == 9
    assert values["specserve_spec_decode_num_accepted_tokens_per_pos", (("position", "0"),)] == 3
    assert values["specserve_round_seconds_sum", ()] == 1.5
    assert values["specserve_round_seconds_count", ()] == 3
    assert values["specserve_engine_load_limit", ()] == 4
