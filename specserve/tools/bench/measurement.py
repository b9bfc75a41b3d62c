"""What a load came to, and what theory makes of the same acceptance and the same rounds. Arithmetic on records; no network, no printing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from specserve.theory import tokens_per_round
from specserve.tools.bench.acceptance import Acceptance
from specserve.tools.bench.counters import ServerSide
from specserve.tools.bench.record import Record

ASSUMPTION = (
    "The prediction assumes that every judged draft token is accepted with the same chance alpha, whatever came before it (2211.17192, Equation 1), "
    "that every proposal has the mean length, and that every stream takes part in every round, each of which takes the server's mean round time."
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of many values of one kind."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None if there are none."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(fmean(ordered), *(percentile(ordered, share) for share in (0.5, 0.9, 0.99)))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which that share of the others lies, interpolated between neighbours; the least at 0, the greatest at 1."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Speculation:
    """What the responses themselves say it did, added up; of requests that were answered in full."""

    rounds: int
    drafted: int
    accepted: int
    anticipated: int
    mean_proposal: float | None  # draft tokens, of rounds that had any

    @classmethod
    def of(cls, records: Sequence[Record]) -> Speculation:
        told = [
            (record.speculation, record.acceptance)
            for record in records
            if record.speculation is not None
        ]

        def total(name: str) -> int:
            return sum(int(object_.get(name, 0)) for object_, _ in told)

        drafting = sum(acceptance.drafting for _, acceptance in told)
        return cls(
            rounds=total("rounds"),
            drafted=total("drafted"),
            accepted=total("accepted"),
            anticipated=total("anticipated"),
            mean_proposal=total("drafted") / drafting if drafting else None,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, tokens and rounds. The spreads are of requests that were answered in full; the rates count whatever came."""

    outcomes: Mapping[str, int]
    duration_s: float  # from the first request sent to the last that ended
    requests_per_s: float
    tokens: int
    tokens_per_s: float
    mean_streams: float  # under way at a time
    mean_decoding: float  # of these, past their first token
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    latency_s: Spread | None
    acceptance: Acceptance
    speculation: Speculation
    server: ServerSide | None  # None: its /metrics could not be read

    @classmethod
    def of(cls, records: Sequence[Record], server: ServerSide | None) -> Measured:
        fine = [record for record in records if record.is_ok]
        duration = max((record.ended for record in records), default=0.0) - min(
            (record.sent for record in records), default=0.0
        )
        tokens = sum(record.tokens for record in records)
        rate = 1 / duration if duration > 0 else 0.0
        return cls(
            outcomes=dict(Counter(record.outcome for record in records).most_common()),
            duration_s=duration,
            requests_per_s=len(fine) * rate,
            tokens=tokens,
            tokens_per_s=tokens * rate,
            mean_streams=sum(record.latency for record in records) * rate,
            mean_decoding=sum(record.decoding for record in records) * rate,
            ttft_s=Spread.of([record.ttft for record in fine if record.ttft is not None]),
            tpot_s=Spread.of([record.tpot for record in fine if record.tpot is not None]),
            itl_s=Spread.of([gap for record in fine for gap in record.gaps]),
            latency_s=Spread.of([record.latency for record in fine]),
            acceptance=Acceptance.sum(record.acceptance for record in records),
            speculation=Speculation.of(fine),
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


def compare(measured: Measured) -> list[Comparison]:
    """As far as what the predictions need is known."""
    acceptance, server = measured.acceptance, measured.server
    if not acceptance.rounds:
        return []
    tokens = predicted_tokens_per_round(acceptance, measured.speculation.mean_proposal)
    found = [Comparison("tokens a round", "", measured_tokens_per_round(acceptance), tokens)]
    if server is None or server.round_s is None or measured.tpot_s is None:
        return found
    each = server.round_s / tokens
    found.append(Comparison("TPOT", "s", measured.tpot_s.mean, each))
    if measured.mean_decoding:
        found.append(
            Comparison(
                "throughput", "tokens/s", measured.tokens_per_s, measured.mean_decoding / each
            )
        )
    return found


def measured_tokens_per_round(acceptance: Acceptance) -> float:
    """The accepted draft tokens and one that is the target's own."""
    assert acceptance.mean_accepted_length is not None
    return 1 + acceptance.mean_accepted_length


def predicted_tokens_per_round(acceptance: Acceptance, mean_proposal: float | None) -> float:
    """Of one sequence, over rounds with and without a proposal."""
    assert acceptance.rounds
    if acceptance.alpha is None or mean_proposal is None:
        return 1.0
    drafting = expected_tokens(acceptance.alpha, mean_proposal)
    return (acceptance.plain + acceptance.drafting * drafting) / acceptance.rounds


def expected_tokens(alpha: float, gamma: float) -> float:
    """`tokens_per_round` for a mean length: that of the two whole lengths beside it, mixed."""
    below = math.floor(gamma)
    return tokens_per_round(alpha, below) + (gamma - below) * (
        tokens_per_round(alpha, below + 1) - tokens_per_round(alpha, below)
    )
