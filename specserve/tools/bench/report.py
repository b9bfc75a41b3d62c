"""Everything that is known after a load, and two of its forms: JSON, and lines for a terminal. The third is page.py."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from textwrap import wrap
from typing import Any

from specserve import __version__
from specserve.tools.bench.measurement import ASSUMPTION, Comparison, Measured, Spread, compare
from specserve.tools.bench.options import Options
from specserve.tools.bench.record import Record

_WIDTH = 120  # of prose on a terminal


@dataclass(frozen=True, slots=True)
class Report:
    """Of one load on one server."""

    options: Options
    model: str
    begun: datetime
    interrupted: bool
    records: Sequence[Record]
    measured: Measured

    @property
    def comparisons(self) -> list[Comparison]:
        return compare(self.measured)

    @property
    def num_failed(self) -> int:
        return sum(record.has_failed for record in self.records)

    @property
    def failures(self) -> dict[str, str]:
        """By outcome, the words of one of them."""
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
        return f"{self.model} at {options.url}: {options.requests} requests of {limit}, {when}, temperature {options.temperature:g}"

    def json(self) -> str:
        measured, acceptance = asdict(self.measured), self.measured.acceptance
        measured["acceptance"] |= {
            "alpha": acceptance.alpha,
            "mean_accepted_length": acceptance.mean_accepted_length,
        }
        whole = {
            "command": self.options.command(),
            "specserve": __version__,
            "begun": self.begun.isoformat(),
            "client": machine(),
            "model": self.model,
            "interrupted": self.interrupted,
            "measured": measured,
            "predicted": {
                "assumes": ASSUMPTION,
                "figures": [asdict(one) | {"ratio": one.ratio} for one in self.comparisons],
            },
            "requests": [_described(record) for record in self.records],
        }
        return json.dumps(whole, allow_nan=False)

    def lines(self) -> Iterator[str]:
        measured = self.measured
        yield self.title
        outcomes = (
            ", ".join(f"{count} {outcome}" for outcome, count in measured.outcomes.items())
            or "none"
        )
        yield (
            f"requests: {outcomes} in {measured.duration_s:.1f} s; {measured.requests_per_s:.2f} requests/s, "
            f"{measured.tokens_per_s:.1f} tokens/s, {measured.mean_streams:.1f} under way at a time"
        )
        yield from (
            f"  {outcome}: {message}" for outcome, message in self.failures.items() if message
        )
        yield ""
        yield from aligned([("ms", "mean", "p50", "p90", "p99"), *spread_rows(measured)])
        yield ""
        if facts := speculation_rows(measured):
            yield from aligned(facts)
            yield ""
        if self.comparisons:
            yield from aligned(
                [("", "measured", "predicted", "ratio"), *comparison_rows(self.comparisons)]
            )
            yield from wrap(ASSUMPTION, width=_WIDTH)


def machine() -> str:
    """Where the load came from."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def spread_rows(measured: Measured) -> list[tuple[str, ...]]:
    """Milliseconds."""
    spreads = {
        "TTFT": measured.ttft_s,
        "TPOT": measured.tpot_s,
        "ITL": measured.itl_s,
        "latency": measured.latency_s,
    }
    return [(name, *_milliseconds(spread)) for name, spread in spreads.items()]


def _milliseconds(spread: Spread | None) -> tuple[str, ...]:
    if spread is None:
        return ("-",) * 4
    return tuple(figure(1e3 * value) for value in (spread.mean, spread.p50, spread.p90, spread.p99))


def speculation_rows(measured: Measured) -> list[tuple[str, str]]:
    """What the tokens' origins tell, and what the server counted; as far as there is anything to tell."""
    acceptance, told, server = measured.acceptance, measured.speculation, measured.server
    rows: list[tuple[str, str | None]] = []
    if acceptance.rounds:
        positions = " ".join(f"{share:.2f}" for share in acceptance.by_position)
        alpha = (
            None
            if acceptance.alpha is None
            else f"{acceptance.alpha:.3f} of {sum(acceptance.reached)} judged; by position {positions}"
        )
        rows.append(("acceptance", alpha))
        rows.append(
            (
                "accepted a round",
                f"{acceptance.mean_accepted_length:.2f} in {acceptance.rounds} rounds, {acceptance.plain} of them plain",
            )
        )
    if told.mean_proposal is not None:
        rows.append(("draft tokens a proposal", f"{told.mean_proposal:.2f}"))
    if server is not None and server.rounds:
        rows.append(
            (
                "anticipation hit rate",
                None
                if server.anticipation_hit_rate is None
                else f"{server.anticipation_hit_rate:.3f}",
            )
        )
        parts = {"round": server.round_s, "verify": server.verify_s, "draft": server.draft_s}
        times = ", ".join(
            f"{name} {figure(1e3 * seconds)}"
            for name, seconds in parts.items()
            if seconds is not None
        )
        rows.append(("the server's means, ms", times or None))
        rows.append(
            (
                "prefix cache hit rate",
                None
                if server.prefix_cache_hit_rate is None
                else f"{server.prefix_cache_hit_rate:.3f}",
            )
        )
        rows.append(("preemptions", str(server.preemptions) if server.preemptions else None))
    return [(name, value) for name, value in rows if value is not None]


def comparison_rows(comparisons: Sequence[Comparison]) -> list[tuple[str, ...]]:
    return [_comparison_row(one) for one in comparisons]


def _comparison_row(one: Comparison) -> tuple[str, ...]:
    scale, unit = (1e3, "ms") if one.unit == "s" else (1.0, one.unit)
    name = f"{one.name}, {unit}" if unit else one.name
    return name, figure(scale * one.measured), figure(scale * one.predicted), f"{one.ratio:.2f}"


def figure(value: float) -> str:
    """Three digits or more."""
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
    """Columns under one another: the first, and one of words, to the left; figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        rest = (
            cells
            if len(cells) == 1
            else [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        )
        yield "  ".join([name.ljust(widths[0]), *rest])


def _described(record: Record) -> Mapping[str, Any]:
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
        "arrivals": [(arrival.at, arrival.tokens) for arrival in record.arrivals],
        "acceptance": asdict(record.acceptance),
        "specserve": record.speculation,
    }
