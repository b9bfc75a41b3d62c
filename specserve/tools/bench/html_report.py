"""The report as one self-contained HTML page: figures, and plots as inline SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from specserve.tools.bench.acceptance import AcceptanceCounts
from specserve.tools.bench.measurement import ASSUMPTION, Measurement, Spread
from specserve.tools.bench.plots import bars, histogram, steps
from specserve.tools.bench.record import RequestRecord
from specserve.tools.bench.report import (
    BenchReport,
    comparison_rows,
    machine,
    speculation_rows,
    spread_rows,
)

_MAX_STEPS = 60  # of the plot over time

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1c2330; --faint: #5c6779; --rule: #d9dee7; --paper: #fff; --fill: #3b7dd8;
  --mark: #d9622b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e4e8ef; --faint: #98a3b5; --rule: #333b49; --paper: #14181f; --fill: #5b9bf0;
    --mark: #f08a54;
  }
}
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 66rem; margin: 2rem auto; padding: 0 1rem;
}
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1rem; margin: 0 0 .3rem; }
code { font-size: .85rem; overflow-wrap: anywhere; }
p { color: var(--faint); margin: .3rem 0; } section { margin-top: 1.8rem; }
.two {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr));
  gap: 1.8rem; margin-top: 1.8rem;
}
.two section { margin: 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { font-weight: 600; }
td, th { padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid var(--rule); text-align: left; }
.figures td:not(:first-child), .figures th:not(:first-child) { text-align: right; }
svg { width: 100%; height: auto; }
svg text {
  font-size: 11px; fill: var(--faint); paint-order: stroke; stroke: var(--paper); stroke-width: 3px;
}
.bar { fill: var(--fill); } .area { fill: var(--fill); opacity: .25; }
.line { fill: none; stroke: var(--fill); stroke-width: 1.5; }
.axis { stroke: var(--faint); } .grid { stroke: var(--rule); } .mark { fill: var(--mark); }
.quantile { stroke: var(--mark); stroke-dasharray: 3 3; }
"""


def render_html(report: BenchReport) -> str:
    """Return the page, which is well-formed XML too."""
    body = "\n".join(_sections(report))
    head = (
        '<meta charset="utf-8"/>\n<meta name="viewport" content="width=device-width"/>\n'
        f"<title>specserve bench</title>\n<style>{STYLE}</style>"
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _sections(report: BenchReport) -> Iterator[str]:
    measurement = report.measurement
    yield f"<h1>{escape(report.title)}</h1>"
    interrupted = "; interrupted" if report.interrupted else ""
    yield (f"<p>{report.started:%Y-%m-%d %H:%M %Z}, load from {escape(machine())}{interrupted}</p>")
    yield f"<p><code>{escape(report.options.command_line())}</code></p>"
    yield from _in_two(
        (
            _section("Requests", _table([("outcome", "requests", "such as"), *_outcomes(report)])),
            _section("Rates", _table(_rates(measurement))),
            _section(
                "Times",
                _table(
                    [("ms", "mean", "p50", "p90", "p99"), *spread_rows(measurement)], figures=True
                ),
            ),
            _section("Speculation", _table(rows))
            if (rows := speculation_rows(measurement))
            else "",
        )
    )
    if report.comparisons:
        compared = [("", "measured", "predicted", "ratio"), *comparison_rows(report.comparisons)]
        yield _section("Measured and predicted", _table(compared, figures=True), ASSUMPTION)
    yield from _in_two(_plots(report))


def _plots(report: BenchReport) -> Iterator[str]:
    complete = [record for record in report.records if record.is_ok]
    measurement = report.measurement
    yield _distribution(
        "Time to first token",
        [record.ttft for record in complete if record.ttft is not None],
        measurement.ttft_s,
    )
    yield _distribution(
        "Time per output token, of each request",
        [record.tpot for record in complete if record.tpot is not None],
        measurement.tpot_s,
    )
    yield _distribution(
        "Gaps between events of a stream",
        [gap for record in complete for gap in record.gaps],
        measurement.itl_s,
    )
    yield _timeline(report.records)
    yield _positions(measurement.acceptance)


def _distribution(title: str, seconds: Sequence[float], spread: Spread | None) -> str:
    if spread is None:
        return ""
    marks = {"p50": 1e3 * spread.p50, "p90": 1e3 * spread.p90, "p99": 1e3 * spread.p99}
    return _section(
        title,
        histogram([1e3 * value for value in seconds], label="ms", marks=marks),
        f"{len(seconds)} values",
    )


def _timeline(records: Sequence[RequestRecord]) -> str:
    events = [event for record in records for event in record.events]
    if not events:
        return ""
    end = max(event.at for event in events) * 1.0001
    num_steps = min(_MAX_STEPS, max(1, len(events) // 10))
    tokens = [0.0] * num_steps
    for event in events:
        tokens[int(event.at / end * num_steps)] += event.tokens
    rates = [count * num_steps / end for count in tokens]
    return _section(
        "Tokens over time",
        steps(rates, end=end, x_label="seconds since the load began", y_label="tokens/s"),
    )


def _positions(acceptance: AcceptanceCounts) -> str:
    alpha = acceptance.alpha
    if alpha is None:
        return ""
    counts = zip(acceptance.accepted, acceptance.reached, strict=True)
    plot = bars(
        acceptance.by_position,
        notes=[f"{accepted} of {reached}" for accepted, reached in counts],
        predicted=[alpha] * len(acceptance.reached),
        x_label="position in the proposal",
        y_label="accepted, of those verified",
    )
    return _section(
        "Acceptance by position",
        plot,
        f"The dots are alpha, {alpha:.3f}: the same everywhere, as the prediction assumes.",
    )


def _outcomes(report: BenchReport) -> Iterator[tuple[str, str, str]]:
    failures = report.failures
    for outcome, count in report.measurement.outcomes.items():
        yield outcome, str(count), failures.get(outcome, "")


def _rates(measurement: Measurement) -> list[tuple[str, str]]:
    return [
        ("duration", f"{measurement.duration_s:.1f} s"),
        ("requests", f"{measurement.requests_per_s:.2f} a second"),
        ("output tokens", f"{measurement.tokens}, {measurement.tokens_per_s:.1f} a second"),
        (
            "requests under way",
            f"{measurement.mean_streams:.1f} at a time, "
            f"{measurement.mean_decoding:.1f} of them past the first token",
        ),
    ]


def _in_two(sections: Iterable[str]) -> Iterator[str]:
    yield '<div class="two">'
    yield from filter(None, sections)
    yield "</div>"


def _section(title: str, content: str, note: str = "") -> str:
    below = f"<p>{escape(note)}</p>" if note else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n{below}</section>"


def _table(rows: Sequence[Sequence[str]], *, figures: bool = False) -> str:
    """Return a table. The first row holds headings if it has more than two columns."""
    cells = ("th" if i == 0 and len(row) > 2 else "td" for i, row in enumerate(rows))
    lines = [
        "<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in row) + "</tr>"
        for cell, row in zip(cells, rows, strict=True)
    ]
    kind = ' class="figures"' if figures else ""
    return f"<table{kind}>\n" + "\n".join(lines) + "\n</table>"
