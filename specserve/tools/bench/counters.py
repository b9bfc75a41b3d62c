"""Counters of the server during a load: the difference between two readings of /metrics.

Knows Prometheus text and the names in metric_families.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from specserve.metrics import MODEL_LABEL, PREFIX

_LINE = re.compile(rf"{PREFIX}(\w+)(?:\{{(.*)\}})? (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Counters:
    """Samples of one moment, or their growth since an earlier one."""

    # By name and the value of the label, of which there is at most one beside the model's name.
    samples: Mapping[tuple[str, str], float]

    @classmethod
    def parse(cls, text: str, model: str) -> Counters:
        """Parse the samples of specserve, skipping histogram buckets and all other lines.

        Of a server with several models, whose names are labels, take the model's only.
        """
        samples: dict[tuple[str, str], float] = {}
        for line in text.splitlines():
            match = _LINE.fullmatch(line)
            if match is None or match[1].endswith("_bucket"):
                continue
            labels = dict(_LABEL.findall(match[2] or ""))
            if labels.pop(MODEL_LABEL, model) != model:
                continue
            key = match[1], next(iter(labels.values()), "")
            samples[key] = samples.get(key, 0.0) + float(match[3])
        return cls(samples)

    def since(self, before: Counters) -> Counters:
        """Return the growth since an earlier reading."""
        return Counters(
            {name: value - before.samples.get(name, 0.0) for name, value in self.samples.items()}
        )

    def total(self, name: str) -> float:
        """Return the sum over all labels, or 0 for a name that was never counted."""
        return sum(value for (known, _), value in self.samples.items() if known == name)

    def by_label(self, name: str) -> dict[str, float]:
        return {label: value for (known, label), value in self.samples.items() if known == name}

    def mean(self, histogram: str) -> float | None:
        """Return the mean of a histogram's observations, or None if there are none."""
        count = self.total(histogram + "_count")
        return self.total(histogram + "_sum") / count if count else None

    def share(self, hits: str, others: str) -> float | None:
        """Return the share of hits in hits and others together, or None if there are neither."""
        both = self.total(hits) + self.total(others)
        return self.total(hits) / both if both else None

    @property
    def work(self) -> tuple[float, ...]:
        """Counters that keep changing until all rounds of the load have reached /metrics."""
        return tuple(
            self.total(name)
            for name in (
                "generation_tokens_total",
                "round_seconds_count",
                "spec_decode_num_draft_tokens_total",
            )
        )


@dataclass(frozen=True, slots=True)
class ServerSide:
    """Figures that the server counted during a load, including requests of other clients."""

    rounds: int
    round_s: float | None  # a mean, like the next two
    verify_s: float | None
    draft_s: float | None
    drafts: int  # proposals that were verified
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    anticipation_hit_rate: float | None  # None: no anticipation
    preemptions: int
    prefix_cache_hit_rate: float | None

    @classmethod
    def from_counters(cls, growth: Counters) -> ServerSide:
        """Collect the figures from the growth of the counters during the load."""
        by_position = growth.by_label("spec_decode_num_accepted_tokens_per_pos_total")
        queries = growth.total("prefix_cache_queries_total")
        return cls(
            rounds=round(growth.total("round_seconds_count")),
            round_s=growth.mean("round_seconds"),
            verify_s=growth.mean("verify_seconds"),
            draft_s=growth.mean("draft_seconds"),
            drafts=round(growth.total("spec_decode_num_drafts_total")),
            draft_tokens=round(growth.total("spec_decode_num_draft_tokens_total")),
            accepted_tokens=round(growth.total("spec_decode_num_accepted_tokens_total")),
            accepted_per_position=tuple(
                round(by_position[position]) for position in sorted(by_position, key=int)
            ),
            anticipation_hit_rate=growth.share(
                "anticipation_hits_total", "anticipation_misses_total"
            ),
            preemptions=round(growth.total("preemptions_total")),
            prefix_cache_hit_rate=growth.total("prefix_cache_hits_total") / queries
            if queries
            else None,
        )
