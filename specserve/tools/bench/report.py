"""The report of a load, as JSON and as lines for a terminal. html_report.py is its third form."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from textwrap import wrap
from typing import Any

from specserve import __version__
from specserve.host import usable_cores
from specserve.tools.bench.acceptance import AcceptanceCounts
from specserve.tools.bench.counters import ServerSide
from specserve.tools.bench.measurement import (
    ASSUMPTION,
    Comparison,
    Measurement,
    Spread,
    compare,
)
from specserve.tools.bench.options import BenchOptions
from specserve.tools.bench.record import RequestRecord

_WIDTH = 120  # columns of prose on a terminal


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Everything known after a load on one server."""

    options: BenchOptions
    model: str
    started: datetime
    interrupted: bool
    records: Sequence[RequestRecord]
    measurement: Measurement

    @property
    def comparisons(self) -> list[Comparison]:
        return compare(self.measurement)

    @property
    def num_failed(self) -> int:
        return sum(record.has_failed for record in self.records)

    @property
    def failures(self) -> dict[str, str]:
        """The message of one failure for each outcome."""
        return {record.outcome: record.message for record in self.records if record.has_failed}

    @property
    def title(self) -> str:
        options = self.options
        when = (
            f"{options.clients} clients"
            if options.rate is None
            else f"{options.rate:g} requests/s arriving"
        )
        limit = f"{'' if options.ignore_eos else 'at most '}{options.max_tokens} tokens"
        return (
            f"{self.model} at {options.url}: {options.requests} requests of {limit}, {when}, "
            f"temperature {options.temperature:g}"
        )

    def json(self) -> str:
        measurement, acceptance = asdict(self.measurement), self.measurement.acceptance
        measurement["acceptance"] |= {
            "alpha": acceptance.alpha,
            "mean_accepted_length": acceptance.mean_accepted_length,
        }
        whole = {
            "command": self.options.as_dict(),
            "specserve": __version__,
            "begun": self.started.isoformat(),
            "client": machine(),
            "model": self.model,
            "interrupted": self.interrupted,
            "measured": measurement,
            "predicted": {
                "assumes": ASSUMPTION,
                "figures": [asdict(one) | {"ratio": one.ratio} for one in self.comparisons],
            },
            "requests": [_described(record) for record in self.records],
        }
        return json.dumps(whole, allow_nan=False)

    def lines(self) -> Iterator[str]:
        measurement = self.measurement
        yield self.title
        outcomes = (
            ", ".join(f"{count} {outcome}" for outcome, count in measurement.outcomes.items())
            or "none"
        )
        yield (
            f"requests: {outcomes} in {measurement.duration_s:.1f} s; "
            f"{measurement.requests_per_s:.2f} requests/s, "
            f"{measurement.tokens_per_s:.1f} tokens/s, "
            f"{measurement.mean_streams:.1f} under way at a time"
        )
        yield from (
            f"  {outcome}: {message}" for outcome, message in self.failures.items() if message
        )
        yield ""
        yield from aligned([("ms", "mean", "p50", "p90", "p99"), *spread_rows(measurement)])
        yield ""
        if rows := speculation_rows(measurement):
            yield from aligned(rows)
            yield ""
        if self.comparisons:
            yield from aligned(
                [("", "measured", "predicted", "ratio"), *comparison_rows(self.comparisons)]
            )
            yield from wrap(ASSUMPTION, width=_WIDTH)


def machine() -> str:
    """Return a description of this machine, from which the load comes."""
    return (
        f"{platform.system()} {platform.machine()}, {usable_cores()} cores, "
        f"Python {platform.python_version()}"
    )


def spread_rows(measurement: Measurement) -> list[tuple[str, ...]]:
    """Return a row of milliseconds for each kind of latency."""
    spreads = {
        "TTFT": measurement.ttft_s,
        "TPOT": measurement.tpot_s,
        "ITL": measurement.itl_s,
        "latency": measurement.latency_s,
    }
    return [(name, *_milliseconds(spread)) for name, spread in spreads.items()]


def _milliseconds(spread: Spread | None) -> tuple[str, ...]:
    if spread is None:
        return ("-",) * 4
    return tuple(figure(1e3 * value) for value in (spread.mean, spread.p50, spread.p90, spread.p99))


def speculation_rows(measurement: Measurement) -> list[tuple[str, str]]:
    """Return what the tokens' origins and the server's counters say, without unknown figures."""
    server, mean_proposal = measurement.server, measurement.speculation.mean_proposal
    rows = _acceptance_rows(measurement.acceptance) if measurement.acceptance.rounds else []
    if mean_proposal is not None:
        rows.append(("draft tokens a proposal", f"{mean_proposal:.2f}"))
    if server is not None and server.rounds:
        rows += _server_rows(server)
    return [(name, value) for name, value in rows if value is not None]


def _acceptance_rows(acceptance: AcceptanceCounts) -> list[tuple[str, str | None]]:
    alpha = None
    if acceptance.alpha is not None:
        positions = " ".join(f"{share:.2f}" for share in acceptance.by_position)
        alpha = (
            f"{acceptance.alpha:.3f} of {sum(acceptance.reached)} verified; by position {positions}"
        )
    accepted = (
        f"{acceptance.mean_accepted_length:.2f} in {acceptance.rounds} rounds, "
        f"{acceptance.plain} of them plain"
    )
    return [("acceptance", alpha), ("accepted a round", accepted)]


def _server_rows(server: ServerSide) -> list[tuple[str, str | None]]:
    parts = {"round": server.round_s, "verify": server.verify_s, "draft": server.draft_s}
    times = ", ".join(
        f"{name} {figure(1e3 * seconds)}" for name, seconds in parts.items() if seconds is not None
    )
    return [
        ("anticipation hit rate", _rate(server.anticipation_hit_rate)),
        ("the server's means, ms", times or None),
        ("prefix cache hit rate", _rate(server.prefix_cache_hit_rate)),
        ("preemptions", str(server.preemptions) if server.preemptions else None),
    ]


def _rate(share: float | None) -> str | None:
    return None if share is None else f"{share:.3f}"


def comparison_rows(comparisons: Sequence[Comparison]) -> list[tuple[str, ...]]:
    return [_comparison_row(one) for one in comparisons]


def _comparison_row(one: Comparison) -> tuple[str, ...]:
    scale, unit = (1e3, "ms") if one.unit == "s" else (1.0, one.unit)
    name = f"{one.name}, {unit}" if unit else one.name
    return name, figure(scale * one.measured), figure(scale * one.predicted), f"{one.ratio:.2f}"


def figure(value: float) -> str:
    """Format a number with at least three digits."""
    return (
        f"{value:.0f}"
        if value >= 1000
        else f"{value:.1f}"
        if value >= 100
        else f"{value:.2f}"
        if value >= 1
        else f"{value:.3g}"
    )


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align columns: the first, and a second one of words, to the left; figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        aligned_cells = (
            cells
            if len(cells) == 1
            else [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        )
        yield "  ".join([name.ljust(widths[0]), *aligned_cells])


def _described(record: RequestRecord) -> Mapping[str, Any]:
    return {
        "number": record.number,
        "outcome": record.outcome,
        "message": record.message,
        "sent_s": record.sent,
        "ended_s": record.ended,
        "ttft_s": record.ttft,
        "tpot_s": record.tpot,
        "latency_s": record.latency,
        "tokens": record.tokens,
        "arrivals": [(event.at, event.tokens) for event in record.events],
        "acceptance": asdict(record.acceptance),
        "specserve": record.speculation,
    }
