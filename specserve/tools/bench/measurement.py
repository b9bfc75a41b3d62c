"""Figures of a load, and what theory predicts for the same acceptance and the same rounds.

Arithmetic on records; no network, no printing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from specserve.theory import tokens_per_round
from specserve.tools.bench.acceptance import AcceptanceCounts
from specserve.tools.bench.counters import ServerSide
from specserve.tools.bench.record import RequestRecord

ASSUMPTION = (
    "The prediction assumes that every verified draft token is accepted with the same chance "
    "alpha, whatever came before it (2211.17192, Equation 1), that every proposal has the mean "
    "length, and that every stream takes part in every round, "
    "each of which takes the server's mean round time."
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of many values of one kind."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread | None:
        """Return the spread of the values, or None if there are none."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(fmean(ordered), *(percentile(ordered, share) for share in (0.5, 0.9, 0.99)))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which that share of the others lies, interpolated linearly.

    Share 0 is the least value, share 1 the greatest.
    """
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class SpeculationTotals:
    """Sums over the `specserve` objects of the requests that were answered in full."""

    rounds: int
    drafted: int
    accepted: int
    anticipated: int
    mean_proposal: float | None  # draft tokens per round with a proposal

    @classmethod
    def from_records(cls, records: Sequence[RequestRecord]) -> SpeculationTotals:
        """Add up the responses that have a `specserve` object."""
        known = [
            (record.speculation, record.acceptance)
            for record in records
            if record.speculation is not None
        ]

        def total(name: str) -> int:
            return sum(int(object_.get(name, 0)) for object_, _ in known)

        drafting = sum(acceptance.drafting for _, acceptance in known)
        return cls(
            rounds=total("rounds"),
            drafted=total("drafted"),
            accepted=total("accepted"),
            anticipated=total("anticipated"),
            mean_proposal=total("drafted") / drafting if drafting else None,
        )


@dataclass(frozen=True, slots=True)
class Measurement:
    """Figures of a load, in seconds, tokens and rounds.

    The spreads are of requests that were answered in full; the rates count all tokens that came.
    """

    outcomes: Mapping[str, int]
    duration_s: float  # from the first request sent to the last that ended
    requests_per_s: float
    tokens: int
    tokens_per_s: float
    mean_streams: float  # requests under way at a time
    mean_decoding: float  # requests past their first token
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    latency_s: Spread | None
    acceptance: AcceptanceCounts
    speculation: SpeculationTotals
    server: ServerSide | None  # None: its /metrics could not be read

    @classmethod
    def from_records(
        cls, records: Sequence[RequestRecord], server: ServerSide | None
    ) -> Measurement:
        """Compute the figures of all requests of a load."""
        complete = [record for record in records if record.is_ok]
        duration = max((record.ended for record in records), default=0.0) - min(
            (record.sent for record in records), default=0.0
        )
        tokens = sum(record.tokens for record in records)
        rate = 1 / duration if duration > 0 else 0.0
        return cls(
            outcomes=dict(Counter(record.outcome for record in records).most_common()),
            duration_s=duration,
            requests_per_s=len(complete) * rate,
            tokens=tokens,
            tokens_per_s=tokens * rate,
            mean_streams=sum(record.latency for record in records) * rate,
            mean_decoding=sum(record.decoding for record in records) * rate,
            ttft_s=Spread.from_values(
                [record.ttft for record in complete if record.ttft is not None]
            ),
            tpot_s=Spread.from_values(
                [record.tpot for record in complete if record.tpot is not None]
            ),
            itl_s=Spread.from_values([gap for record in complete for gap in record.gaps]),
            latency_s=Spread.from_values([record.latency for record in complete]),
            acceptance=AcceptanceCounts.sum(record.acceptance for record in records),
            speculation=SpeculationTotals.from_records(complete),
            server=server,
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, measured and predicted."""

    name: str
    unit: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def compare(measurement: Measurement) -> list[Comparison]:
    """Compare measured and predicted figures, as far as the predictions' inputs are known."""
    acceptance, server = measurement.acceptance, measurement.server
    if not acceptance.rounds:
        return []
    tokens = predicted_tokens_per_round(acceptance, measurement.speculation.mean_proposal)
    comparisons = [Comparison("tokens a round", "", measured_tokens_per_round(acceptance), tokens)]
    if server is None or server.round_s is None or measurement.tpot_s is None:
        return comparisons
    each = server.round_s / tokens
    comparisons.append(Comparison("TPOT", "s", measurement.tpot_s.mean, each))
    if measurement.mean_decoding:
        predicted = measurement.mean_decoding / each
        comparisons.append(
            Comparison("throughput", "tokens/s", measurement.tokens_per_s, predicted)
        )
    return comparisons


def measured_tokens_per_round(acceptance: AcceptanceCounts) -> float:
    """Return the accepted draft tokens per round, plus one token of the target's own."""
    assert acceptance.mean_accepted_length is not None
    return 1 + acceptance.mean_accepted_length


def predicted_tokens_per_round(acceptance: AcceptanceCounts, mean_proposal: float | None) -> float:
    """Return the expected tokens of a sequence per round, with or without a proposal."""
    assert acceptance.rounds
    if acceptance.alpha is None or mean_proposal is None:
        return 1.0
    drafting = expected_tokens(acceptance.alpha, mean_proposal)
    return (acceptance.plain + acceptance.drafting * drafting) / acceptance.rounds


def expected_tokens(alpha: float, gamma: float) -> float:
    """Interpolate `tokens_per_round` between the two whole lengths next to a mean length."""
    below = math.floor(gamma)
    return tokens_per_round(alpha, below) + (gamma - below) * (
        tokens_per_round(alpha, below + 1) - tokens_per_round(alpha, below)
    )
