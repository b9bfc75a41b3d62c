"""Metrics: one table of names, a registry a process, snapshots that add up, Prometheus text.

Knows no engine and no HTTP.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

PREFIX = "specserve_"
MODEL_LABEL = "model_name"
"""Label of all metrics of one of several models, after the labels of their family."""
CONTENT_TYPE = "text/plain; version=0.0.4"

# the values, in the order that the family declares, and the model's name if there are several
Labels = tuple[str, ...]
# counter: (total,); gauge: (sum, how many reported it); histogram: (each bucket's count, ..., sum)
Sample = tuple[float, ...]


class MetricKind(StrEnum):
    COUNTER = "counter"
    SUMMED = "gauge, summed over replicas"
    AVERAGED = "gauge, averaged over replicas"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric's name, kind, help text and labels."""

    name: str  # without the prefix
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    # Upper bounds of a histogram's buckets; one more bucket takes the rest.
    bounds: tuple[float, ...] = ()


_REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
_ROUND_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
)

FAMILIES = (
    MetricFamily(
        "spec_decode_num_drafts_total", MetricKind.COUNTER, "Proposals that were verified."
    ),
    MetricFamily(
        "spec_decode_num_draft_tokens_total", MetricKind.COUNTER, "Draft tokens that were verified."
    ),
    MetricFamily(
        "spec_decode_num_accepted_tokens_total",
        MetricKind.COUNTER,
        "Draft tokens that were accepted.",
    ),
    MetricFamily(
        "spec_decode_num_accepted_tokens_per_pos_total",
        MetricKind.COUNTER,
        "Draft tokens accepted, by position in their proposal.",
        ("position",),
    ),
    MetricFamily(
        "anticipation_hits_total",
        MetricKind.COUNTER,
        "Proposals that lay ready when they were asked for.",
    ),
    MetricFamily("anticipation_misses_total", MetricKind.COUNTER, "Proposals that did not."),
    MetricFamily("prompt_tokens_total", MetricKind.COUNTER, "Tokens of prompts."),
    MetricFamily("generation_tokens_total", MetricKind.COUNTER, "Tokens written."),
    MetricFamily(
        "request_success_total",
        MetricKind.COUNTER,
        "Continuations that came to their end, by why they ended.",
        ("finished_reason",),
    ),
    MetricFamily(
        "request_failure_total",
        MetricKind.COUNTER,
        "Requests that failed, by HTTP status; 499 is a client that left.",
        ("code",),
    ),
    MetricFamily(
        "rate_limited_total",
        MetricKind.COUNTER,
        "Requests refused by a key's limit of requests, tokens, concurrent or grammars.",
        ("limit",),
    ),
    MetricFamily(
        "worker_restarts_total", MetricKind.COUNTER, "Workers that were restarted.", ("role",)
    ),
    MetricFamily(
        "slow_passes_total",
        MetricKind.COUNTER,
        "Passes far slower than others of their size on the same device.",
        ("role",),
    ),
    MetricFamily(
        "requests_resumed_total",
        MetricKind.COUNTER,
        "Requests that went on elsewhere after a failure.",
    ),
    MetricFamily(
        "preemptions_total", MetricKind.COUNTER, "Sequences preempted because the cache was full."
    ),
    MetricFamily(
        "prefix_cache_queries_total",
        MetricKind.COUNTER,
        "Prompt tokens looked up in the prefix cache.",
    ),
    MetricFamily("prefix_cache_hits_total", MetricKind.COUNTER, "Prompt tokens found there."),
    MetricFamily("num_requests_running", MetricKind.SUMMED, "Sequences that take part in rounds."),
    MetricFamily("num_requests_waiting", MetricKind.SUMMED, "Sequences in the queue."),
    MetricFamily(
        "kv_cache_usage_perc",
        MetricKind.AVERAGED,
        "Share of the cache's pages in use, 0 to 1.",
        ("role",),
    ),
    MetricFamily(
        "gamma", MetricKind.AVERAGED, "Draft tokens a sequence and round, as last chosen."
    ),
    MetricFamily(
        "device_busy_fraction",
        MetricKind.AVERAGED,
        "Share of the time that a worker computes, 0 to 1.",
        ("role",),
    ),
    MetricFamily(
        "api_keys_valid",
        MetricKind.AVERAGED,
        "Share of the gateways whose file of API keys can be used, 0 to 1; absent without keys.",
    ),
    MetricFamily("replicas", MetricKind.SUMMED, "Engine replicas that run."),
    MetricFamily("min_replicas", MetricKind.SUMMED, "Engine replicas that run at least."),
    MetricFamily(
        "avoided_devices",
        MetricKind.SUMMED,
        "Devices that engines avoid, since they have failed or were slow in the last ten minutes.",
    ),
    MetricFamily(
        "pool_engines",
        MetricKind.SUMMED,
        "Engines that one device of a draft pool drafts for.",
        ("pool", "replica"),
    ),
    MetricFamily(
        "pool_busy_fraction",
        MetricKind.AVERAGED,
        "Share of the time that a device of a draft pool computes, 0 to 1: proposals that were "
        "asked for (draft), or likely next ones, for which all the time that is left is used "
        "(anticipate).",
        ("pool", "replica", "work"),
    ),
    MetricFamily(
        "pool_load",
        MetricKind.AVERAGED,
        "Share of the time that a device of a draft pool would draft if it prepared nothing, by "
        "which the pool grows and shrinks.",
        ("pool", "replica"),
    ),
    MetricFamily(
        "pool_batches_total",
        MetricKind.COUNTER,
        "Batches of a draft pool: passes in a row, while some round waits for its drafts.",
        ("pool",),
    ),
    MetricFamily(
        "pool_rounds_total",
        MetricKind.COUNTER,
        "Rounds of engines in those batches; above one a batch, engines have shared it.",
        ("pool",),
    ),
    MetricFamily(
        "gateway_cpu_share",
        MetricKind.AVERAGED,
        "Share of a core that the process of one gateway uses, by which gateways scale beside "
        "their streams; above 1 with several threads.",
        ("replica",),
    ),
    MetricFamily(
        "engine_num_requests_running",
        MetricKind.SUMMED,
        "Sequences of one engine that take part in rounds.",
        ("replica",),
    ),
    MetricFamily(
        "engine_num_requests_waiting",
        MetricKind.SUMMED,
        "Sequences in the queue of one engine.",
        ("replica",),
    ),
    MetricFamily(
        "engine_load_limit",
        MetricKind.SUMMED,
        "Requests of one engine up to which first tokens keep to replicas.target_ttft_s; 0 while "
        "none was too late.",
        ("replica",),
    ),
    MetricFamily(
        "engine_kv_cache_usage_perc",
        MetricKind.AVERAGED,
        "Share of one engine's pages in use, 0 to 1.",
        ("replica", "role"),
    ),
    MetricFamily(
        "engine_device_busy_fraction",
        MetricKind.AVERAGED,
        "Share of the time that a worker of one engine computes, 0 to 1.",
        ("replica", "role"),
    ),
    MetricFamily(
        "engine_prefix_cache_queries",
        MetricKind.SUMMED,
        "Prompt tokens that one engine looked up in its prefix cache since it started.",
        ("replica",),
    ),
    MetricFamily(
        "engine_prefix_cache_hits",
        MetricKind.SUMMED,
        "Prompt tokens that one engine found there.",
        ("replica",),
    ),
    MetricFamily(
        "rank_busy_fraction",
        MetricKind.AVERAGED,
        "Share of the time that one rank of a target computes or waits for others, 0 to 1.",
        ("replica", "rank"),
    ),
    MetricFamily(
        "rank_pass_seconds",
        MetricKind.AVERAGED,
        "Mean time of one rank's passes, of the last second that had any.",
        ("replica", "rank"),
    ),
    MetricFamily(
        "time_to_first_token_seconds",
        MetricKind.HISTOGRAM,
        "From a request's arrival to its first token.",
        bounds=_REQUEST_S,
    ),
    MetricFamily(
        "time_per_output_token_seconds",
        MetricKind.HISTOGRAM,
        "Mean time a token after the first, of one continuation.",
        bounds=_TOKEN_S,
    ),
    MetricFamily(
        "e2e_request_latency_seconds",
        MetricKind.HISTOGRAM,
        "From a request's arrival to its last token.",
        bounds=_REQUEST_S,
    ),
    MetricFamily(
        "verify_seconds", MetricKind.HISTOGRAM, "The target's part of a round.", bounds=_ROUND_S
    ),
    MetricFamily(
        "draft_seconds", MetricKind.HISTOGRAM, "The drafter's part of a round.", bounds=_ROUND_S
    ),
    MetricFamily("round_seconds", MetricKind.HISTOGRAM, "A whole round.", bounds=_ROUND_S),
)

FAMILY_LABELS = {family.name: family.labels for family in FAMILIES}
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
        for line in _lines(family, snapshot.samples.get(family.name, {}))
    )


def _lines(family: MetricFamily, samples: Mapping[Labels, Sample]) -> Iterator[str]:
    name = PREFIX + family.name
    kind = "gauge" if family.kind in (MetricKind.SUMMED, MetricKind.AVERAGED) else family.kind.value
    yield f"# HELP {name} {family.help}"
    yield f"# TYPE {name} {kind}"
    for values, sample in sorted(samples.items()):
        labels = dict(zip((*family.labels, MODEL_LABEL), values, strict=False))
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
