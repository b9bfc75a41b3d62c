"""A server's own account of a load: the difference between two readings of its /metrics. Knows Prometheus text and the names in metrics.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from specserve.metrics import PREFIX

_LINE = re.compile(rf"{PREFIX}(\w+)(?:\{{(.*)\}})? (\S+)")
_LABEL = re.compile(r'\w+="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Counters:
    """The samples of one moment, or how far they have grown since an earlier one."""

    samples: Mapping[
        tuple[str, str], float
    ]  # by name and the value of the one label that there may be

    @classmethod
    def parse(cls, text: str) -> Counters:
        """Passes over whatever is not a sample of specserve's, and over buckets."""
        samples = {}
        for line in text.splitlines():
            match = _LINE.fullmatch(line)
            if match is None or match[1].endswith("_bucket"):
                continue
            labels = _LABEL.findall(match[2] or "")
            samples[match[1], labels[0] if labels else ""] = float(match[3])
        return cls(samples)

    def since(self, before: Counters) -> Counters:
        return Counters(
            {name: value - before.samples.get(name, 0.0) for name, value in self.samples.items()}
        )

    def total(self, name: str) -> float:
        """Over all labels; 0 for what was never counted."""
        return sum(value for (known, _), value in self.samples.items() if known == name)

    def by_label(self, name: str) -> dict[str, float]:
        return {label: value for (known, label), value in self.samples.items() if known == name}

    def mean(self, histogram: str) -> float | None:
        """Of what was observed; None if nothing was."""
        count = self.total(histogram + "_count")
        return self.total(histogram + "_sum") / count if count else None

    def share(self, hits: str, others: str) -> float | None:
        """Of the hits in both together."""
        both = self.total(hits) + self.total(others)
        return self.total(hits) / both if both else None

    @property
    def work(self) -> tuple[float, ...]:
        """Changes for as long as a round's news are under way to whoever answers /metrics."""
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
    """What the server says of the time of a load. Requests of others that it served meanwhile are in it."""

    rounds: int
    round_s: float | None  # means
    verify_s: float | None
    draft_s: float | None
    drafts: int  # proposals that were verified
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    anticipation_hit_rate: float | None  # None: nothing was anticipated
    preemptions: int
    prefix_cache_hit_rate: float | None

    @classmethod
    def of(cls, grown: Counters) -> ServerSide:
        by_position = grown.by_label("spec_decode_num_accepted_tokens_per_pos_total")
        queries = grown.total("prefix_cache_queries_total")
        return cls(
            rounds=round(grown.total("round_seconds_count")),
            round_s=grown.mean("round_seconds"),
            verify_s=grown.mean("verify_seconds"),
            draft_s=grown.mean("draft_seconds"),
            drafts=round(grown.total("spec_decode_num_drafts_total")),
            draft_tokens=round(grown.total("spec_decode_num_draft_tokens_total")),
            accepted_tokens=round(grown.total("spec_decode_num_accepted_tokens_total")),
            accepted_per_position=tuple(
                round(by_position[position]) for position in sorted(by_position, key=int)
            ),
            anticipation_hit_rate=grown.share(
                "anticipation_hits_total", "anticipation_misses_total"
            ),
            preemptions=round(grown.total("preemptions_total")),
            prefix_cache_hit_rate=grown.total("prefix_cache_hits_total") / queries
            if queries
            else None,
        )
