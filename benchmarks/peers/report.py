"""What a contest came to, as a page and as JSON: every system, also where it wins, and whether the goals are reached."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.comparison import MANY, ONE, OURS, Row

GOALS = {ONE: 1.2, MANY: 1.0}


@dataclass(frozen=True, slots=True)
class About:
    """What must be said beside the figures."""

    machine: str
    work: str
    idle: float  # share of the machine that was busy while all systems were loaded and nothing was asked
    systems: Mapping[str, Mapping[str, str]]  # what each says of itself
    absent: Mapping[str, str]  # why others are not there


def page(rows: Sequence[Row], about: About) -> str:
    lines = [
        "# Against what a user would pick instead",
        "",
        "`make bench-peers`",
        "",
        f"{about.machine}; {about.work}",
        "",
    ]
    lines += _systems(about)
    lines += [
        f"With all of them loaded and nothing asked, the machine was {about.idle:.1%} busy.",
        "",
    ]
    for streams in (ONE, MANY):
        lines += _table([row for row in rows if row.streams == streams], streams)
    return "\n".join([*lines, *_ratios(rows)]) + "\n"


def as_json(rows: Sequence[Row], about: About) -> str:
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
    said = {
        "machine": about.machine,
        "work": about.work,
        "idle": about.idle,
        "systems": dict(about.systems),
        "absent": dict(about.absent),
    }
    return json.dumps({**said, "rows": figures}, indent=1) + "\n"


def best_peer(rows: Sequence[Row], streams: int) -> Row | None:
    """The fastest row that is not ours; None if no peer ran."""
    peers = [
        row
        for row in rows
        if row.streams == streams and row.entry.system != OURS and row.error is None
    ]
    return max(peers, key=lambda row: row.middle, default=None)


def _systems(about: About) -> list[str]:
    lines = ["| system | version | threads (its own choice) | runs in |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {said['version']} | {said['threads']} | {said['precision']} |"
        for name, said in about.systems.items()
    ]
    lines += [
        f"| {name} | could not be run: {_cell(why)} | | |" for name, why in about.absent.items()
    ]
    return [*lines, ""]


def _table(rows: Sequence[Row], streams: int) -> list[str]:
    title = f"{streams} stream{'s' if streams > 1 else ''}: output tokens a second"
    reference = next(
        (row.texts for row in rows if row.entry.system == OURS and row.error is None), ()
    )
    lines = [f"| {title} | gamma | median | spread | same text as ours |", "|---|---|---|---|---|"]
    return [*lines, *(_line(row, reference) for row in rows), ""]


def _line(row: Row, reference: Sequence[str]) -> str:
    name = f"{row.entry.system}, {row.entry.name}"
    if row.error is not None:
        return f"| {name} | | could not be run: {_cell(row.error)} | | |"
    same = (
        f"{sum(map(_same, row.texts, reference))} of {len(row.texts)}"
        if reference
        else "ours did not run"
    )
    spread = f"{min(row.rates):.1f} to {max(row.rates):.1f}"
    return f"| {name} | {_gamma(row)} | {row.middle:.1f} | {spread} | {same} |"


def _same(text: str, other: str) -> bool:
    """A character that is cut at the end is shown by some and left out by others."""
    return text.rstrip("\ufffd") == other.rstrip("\ufffd")


def _gamma(row: Row) -> str:
    if row.entry.mode == "plain":
        return ""
    return "its own" if row.gamma is None else str(row.gamma)


def _ratios(rows: Sequence[Row]) -> list[str]:
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


def _ratio(row: Row, best: Row | None, goal: float) -> str:
    streams = f"{row.streams} stream{'s' if row.streams > 1 else ''}"
    if best is None or row.error is not None:
        return f"| {streams}, {row.entry.name} | nothing to compare | {goal} | not measured |"
    ratio = row.against(best)
    name = f"{best.entry.system}, {best.entry.name}"
    return f"| {streams}, {row.entry.name}, against {name} | {ratio:.2f} | {goal} | {'reached' if ratio >= goal else 'not reached'} |"


def _cell(text: str) -> str:
    return text.replace("|", "/")
