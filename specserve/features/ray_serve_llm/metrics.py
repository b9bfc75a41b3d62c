"""Our metrics in Ray's backend, where Serve adds application, deployment and replica."""

from __future__ import annotations

from typing import Any

from ray.serve import metrics as serve_metrics

from specserve.metric_families import FAMILIES, MetricFamily, MetricKind
from specserve.metrics import PREFIX, Labels, Sample, Snapshot

SET_BY_SERVE = ("application", "deployment", "replica")


class RayMetrics:
    """Counters and gauges of Ray that follow the snapshots of one engine.

    Ray's histograms take single observations, so ours are two counters, `_sum` and `_count`.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._totals: dict[tuple[str, Labels], float] = {}  # exported so far

    def export(self, snapshot: Snapshot) -> None:
        for family in FAMILIES:
            for labels, sample in snapshot.samples.get(family.name, {}).items():
                self._export_sample(family, labels, sample)

    def _export_sample(self, family: MetricFamily, labels: Labels, sample: Sample) -> None:
        match family.kind:
            case MetricKind.COUNTER:
                self._add(family, family.name.removesuffix("_total"), labels, sample[0])
            case MetricKind.HISTOGRAM:
                self._add(family, f"{family.name}_sum", labels, sample[-1])
                self._add(family, f"{family.name}_count", labels, sum(sample[:-1]))
            case _:
                value = sample[0] / sample[1]
                gauge = self._metric(serve_metrics.Gauge, family, family.name)
                gauge.set(value, tags=_tags(family, labels))

    def _add(self, family: MetricFamily, name: str, labels: Labels, total: float) -> None:
        """Add to a counter what it lacks; a total that fell began again, after a sleep."""
        before = self._totals.get((name, labels), 0.0)
        self._totals[name, labels] = total
        amount = total - before if total >= before else total
        if amount > 0:
            counter = self._metric(serve_metrics.Counter, family, name)
            counter.inc(amount, tags=_tags(family, labels))

    def _metric(self, kind: Any, family: MetricFamily, name: str) -> Any:
        if name not in self._metrics:
            keys = tuple(label for label in family.labels if label not in SET_BY_SERVE)
            self._metrics[name] = kind(PREFIX + name, description=family.help, tag_keys=keys)
        return self._metrics[name]


def _tags(family: MetricFamily, labels: Labels) -> dict[str, str]:
    named = zip(family.labels, labels, strict=False)
    return {name: value for name, value in named if name not in SET_BY_SERVE}
