"""Report a comparison as a page and as JSON: every system, the ratios, and the goals.

Systems that are faster than ours are in it like all others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.comparison import MANY, ONE, OURS, ComparisonRow

GOALS = {ONE: 1.2, MANY: 1.0}


@dataclass(frozen=True, slots=True)
class RunDescription:
    """Machine, work and systems, which the report states beside the figures."""

    machine: str
    work: str
    busy_when_idle: float
    """Share of the machine that is busy while all systems are loaded and none has a turn."""
    systems: Mapping[str, Mapping[str, str]]
    """Version, threads and precision that each system states."""
    absent: Mapping[str, str]
    """Reasons why other systems could not run."""


def page(rows: Sequence[ComparisonRow], description: RunDescription) -> str:
    lines = [
        "# Against what a user would pick instead",
        "",
        "`make bench-peers`",
        "",
        f"{description.machine}; {description.work}",
        "",
    ]
    lines += _systems(description)
    lines += [
        "With all of them loaded and nothing asked, the machine was "
        f"{description.busy_when_idle:.1%} busy.",
        "",
    ]
    for streams in (ONE, MANY):
        lines += _table([row for row in rows if row.streams == streams], streams)
    return "\n".join([*lines, *_ratios(rows)]) + "\n"


def as_json(rows: Sequence[ComparisonRow], description: RunDescription) -> str:
    figures = [
        {
            "system": row.entry.system,
            "entry": row.entry.name,
            "streams": row.streams,
            "gamma": row.gamma,
            "rates": row.rates,
            "error": row.error,
        }
        for row in rows
    ]
    run = {
        "machine": description.machine,
        "work": description.work,
        "idle": description.busy_when_idle,
        "systems": dict(description.systems),
        "absent": dict(description.absent),
    }
    return json.dumps({**run, "rows": figures}, indent=1) + "\n"


def best_peer(rows: Sequence[ComparisonRow], streams: int) -> ComparisonRow | None:
    """Return the fastest row that is not ours, or None if no peer ran."""
    peers = [
        row
        for row in rows
        if row.streams == streams and row.entry.system != OURS and row.error is None
    ]
    return max(peers, key=lambda row: row.median_rate, default=None)


def _systems(description: RunDescription) -> list[str]:
    lines = ["| system | version | threads (its own choice) | runs in |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {about['version']} | {about['threads']} | {about['precision']} |"
        for name, about in description.systems.items()
    ]
    lines += [
        f"| {name} | could not be run: {_escape_cell(why)} | | |"
        for name, why in description.absent.items()
    ]
    return [*lines, ""]


def _table(rows: Sequence[ComparisonRow], streams: int) -> list[str]:
    title = f"{streams} stream{'s' if streams > 1 else ''}: output tokens a second"
    reference = next(
        (row.texts for row in rows if row.entry.system == OURS and row.error is None), ()
    )
    lines = [f"| {title} | gamma | median | spread | same text as ours |", "|---|---|---|---|---|"]
    return [*lines, *(_line(row, reference) for row in rows), ""]


def _line(row: ComparisonRow, reference: Sequence[str]) -> str:
    name = f"{row.entry.system}, {row.entry.name}"
    if row.error is not None:
        return f"| {name} | | could not be run: {_escape_cell(row.error)} | | |"
    same = (
        f"{sum(map(_same, row.texts, reference))} of {len(row.texts)}"
        if reference
        else "ours did not run"
    )
    spread = f"{min(row.rates):.1f} to {max(row.rates):.1f}"
    return f"| {name} | {_gamma(row)} | {row.median_rate:.1f} | {spread} | {same} |"


def _same(text: str, other: str) -> bool:
    """Return whether the texts are equal, apart from a character that is cut at the end.

    Some systems show such a character and others omit it.
    """
    return text.rstrip("\ufffd") == other.rstrip("\ufffd")


def _gamma(row: ComparisonRow) -> str:
    if row.entry.mode == "plain":
        return ""
    return "its own" if row.gamma is None else str(row.gamma)


def _ratios(rows: Sequence[ComparisonRow]) -> list[str]:
    lines = [
        "| ours against the best of the others, turn by turn | ratio | goal | |",
        "|---|---|---|---|",
    ]
    for streams, goal in GOALS.items():
        best = best_peer(rows, streams)
        for row in rows:
            if row.streams == streams and row.entry.system == OURS and row.entry.mode != "plain":
                lines.append(_ratio(row, best, goal))
    return lines


def _ratio(row: ComparisonRow, best: ComparisonRow | None, goal: float) -> str:
    streams = f"{row.streams} stream{'s' if row.streams > 1 else ''}"
    if best is None or row.error is not None:
        return f"| {streams}, {row.entry.name} | nothing to compare | {goal} | not measured |"
    ratio = row.ratio_to(best)
    name = f"{best.entry.system}, {best.entry.name}"
    return (
        f"| {streams}, {row.entry.name}, against {name} | {ratio:.2f} | {goal} | "
        f"{'reached' if ratio >= goal else 'not reached'} |"
    )


def _escape_cell(text: str) -> str:
    return text.replace("|", "/")
