"""Metrics: a registry a process, snapshots that add up, Prometheus text.

Knows no engine and no HTTP.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from specserve.metric_families import FAMILIES, FAMILY_LABELS, MetricFamily, MetricKind

PREFIX = "specserve_"
MODEL_LABEL = "model_name"
"""Label of all metrics of one of several models, after the labels of their family."""
CONTENT_TYPE = "text/plain; version=0.0.4"

# the values, in the order that the family declares, and the model's name if there are several
Labels = tuple[str, ...]
# counter: (total,); gauge: (sum, how many reported it); histogram: (each bucket's count, ..., sum)
Sample = tuple[float, ...]


_LASTING = (MetricKind.COUNTER, MetricKind.HISTOGRAM)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The samples of one moment, by family and labels, as plain numbers."""

    samples: Mapping[str, Mapping[Labels, Sample]]

    def lasting(self) -> Snapshot:
        """Return what still counts when the process is gone: all but the gauges."""
        return Snapshot(
            {
                family.name: self.samples[family.name]
                for family in FAMILIES
                if family.kind in _LASTING and family.name in self.samples
            }
        )

    def of_model(self, name: str) -> Snapshot:
        """Return the samples with the name of their model; without one, as they are."""
        if not name:
            return self
        return Snapshot(
            {
                family: {(*labels, name): sample for labels, sample in samples.items()}
                for family, samples in self.samples.items()
            }
        )

    def over_models(self) -> Snapshot:
        """Return the samples of all models together."""
        parts = [
            Snapshot({name: {labels[: len(FAMILY_LABELS.get(name, labels))]: sample}})
            for name, samples in self.samples.items()
            for labels, sample in samples.items()
        ]
        return merge(parts)

    def counted(self) -> Snapshot:
        """Return the samples that are not 0."""
        return Snapshot(
            {
                name: {labels: sample for labels, sample in samples.items() if any(sample)}
                for name, samples in self.samples.items()
            }
        )


class Counter:
    """A total that only grows."""

    __slots__ = ("_family", "_totals")

    def __init__(self, family: MetricFamily) -> None:
        self._family = family
        self._totals: dict[Labels, float] = {} if family.labels else {(): 0.0}

    def add(self, amount: float = 1, *labels: str) -> None:
        assert amount >= 0
        assert len(labels) == len(self._family.labels)
        self._totals[labels] = self._totals.get(labels, 0.0) + amount

    def samples(self) -> dict[Labels, Sample]:
        return {labels: (total,) for labels, total in self._totals.items()}


class Gauge:
    """The last value set; absent until there is one."""

    __slots__ = ("_family", "_values")

    def __init__(self, family: MetricFamily) -> None:
        self._family = family
        self._values: dict[Labels, float] = {}

    def set(self, value: float, *labels: str) -> None:
        assert len(labels) == len(self._family.labels)
        self._values[labels] = value

    def samples(self) -> dict[Labels, Sample]:
        return {labels: (value, 1.0) for labels, value in self._values.items()}


class Histogram:
    """Observations a bucket, and their sum."""

    __slots__ = ("_family", "_rows")

    def __init__(self, family: MetricFamily) -> None:
        self._family = family
        self._rows: dict[Labels, list[float]] = {} if family.labels else {(): self._empty()}

    def observe(self, value: float, *labels: str) -> None:
        assert len(labels) == len(self._family.labels)
        row = self._rows.get(labels)
        if row is None:
            row = self._rows[labels] = self._empty()
        row[bisect_left(self._family.bounds, value)] += 1
        row[-1] += value

    def samples(self) -> dict[Labels, Sample]:
        return {labels: tuple(row) for labels, row in self._rows.items()}

    def _empty(self) -> list[float]:
        return [0.0] * (len(self._family.bounds) + 2)


class Registry:
    """The metrics of one process, by their names in `FAMILIES`; for one thread at a time."""

    def __init__(self) -> None:
        kinds = {
            kind: [family for family in FAMILIES if family.kind is kind] for kind in MetricKind
        }
        self._counters = {family.name: Counter(family) for family in kinds[MetricKind.COUNTER]}
        self._gauges = {
            family.name: Gauge(family)
            for family in (*kinds[MetricKind.SUMMED], *kinds[MetricKind.AVERAGED])
        }
        self._histograms = {
            family.name: Histogram(family) for family in kinds[MetricKind.HISTOGRAM]
        }

    def counter(self, name: str) -> Counter:
        return self._counters[name]

    def gauge(self, name: str) -> Gauge:
        return self._gauges[name]

    def histogram(self, name: str) -> Histogram:
        return self._histograms[name]

    def snapshot(self) -> Snapshot:
        metrics: dict[str, Counter | Gauge | Histogram] = {
            **self._counters,
            **self._gauges,
            **self._histograms,
        }
        return Snapshot({name: metric.samples() for name, metric in metrics.items()})


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Return the snapshot of several processes together: all samples are sums."""
    merged: dict[str, dict[Labels, Sample]] = {}
    for snapshot in snapshots:
        for name, samples in snapshot.samples.items():
            rows = merged.setdefault(name, {})
            for labels, sample in samples.items():
                rows[labels] = (
                    tuple(map(sum, zip(rows[labels], sample, strict=True)))
                    if labels in rows
                    else sample
                )
    return Snapshot(merged)


def render(snapshot: Snapshot) -> str:
    """Return the snapshot as Prometheus text, format 0.0.4."""
    return "".join(
        line + "\n"
        for family in FAMILIES
        for line in family_lines(
            PREFIX + family.name, family, _labelled(family, snapshot.samples.get(family.name, {}))
        )
    )


def _labelled(
    family: MetricFamily, samples: Mapping[Labels, Sample]
) -> Iterator[tuple[dict[str, str], Sample]]:
    for values, sample in sorted(samples.items()):
        yield dict(zip((*family.labels, MODEL_LABEL), values, strict=False)), sample


def family_lines(
    name: str, family: MetricFamily, samples: Iterable[tuple[Mapping[str, str], Sample]]
) -> Iterator[str]:
    """Yield the lines of one metric under a name, its samples beside their labels."""
    kind = "gauge" if family.kind in (MetricKind.SUMMED, MetricKind.AVERAGED) else family.kind.value
    yield f"# HELP {name} {family.help}"
    yield f"# TYPE {name} {kind}"
    for labels, sample in samples:
        match family.kind:
            case MetricKind.HISTOGRAM:
                yield from _buckets(name, family.bounds, labels, sample)
            case MetricKind.AVERAGED:
                yield f"{name}{_braces(labels)} {_number(sample[0] / sample[1])}"
            case _:
                yield f"{name}{_braces(labels)} {_number(sample[0])}"


def _buckets(
    name: str, bounds: tuple[float, ...], labels: Mapping[str, str], sample: Sample
) -> Iterator[str]:
    *counts, total = sample
    below = 0.0
    for bound, count in zip((*map(_number, bounds), "+Inf"), counts, strict=True):
        below += count  # Prometheus counts what is at or below each bound
        yield f"{name}_bucket{_braces({**labels, 'le': bound})} {_number(below)}"
    yield f"{name}_sum{_braces(labels)} {_number(total)}"
    yield f"{name}_count{_braces(labels)} {_number(below)}"


def _braces(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
