"""Report a comparison as a page and as JSON: every system, the ratios, and the goals.

Systems that are faster than ours are in it like all others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from lab.bench.peers.comparison import ComparisonRow
from lab.bench.peers.entries import EIGHT, HTTP, IN_PROCESS, ONE, PREFILL, WIDE
from lab.bench.peers.section import ComparisonSection, SystemState

GOALS: Mapping[str, Mapping[str, float]] = {
    IN_PROCESS: {ONE: 1.0, EIGHT: 1.2, WIDE: 1.0, PREFILL: 1.0},
    HTTP: {ONE: 1.0, EIGHT: 1.1, WIDE: 1.0, PREFILL: 1.0},
}
UNITS = {PREFILL: "prompt tokens a second"}
SERVERLESS = (
    "OpenVINO is measured in process only: of its model server the package index has only a "
    "client (`ovmsclient`)."
)


@dataclass(frozen=True, slots=True)
class RunDescription:
    """Machine and work, which the report states beside the figures."""

    machine: str
    work: str


def page(
    sections: Sequence[ComparisonSection], description: RunDescription, *, stem: str | None = None
) -> str:
    """Return the page; with a stem it shows the plots that lie beside it."""
    lines = [
        "# Against what a user would pick instead",
        "",
        "`python -m lab.bench.peers`",
        "",
        f"{description.machine}. {description.work}",
        "",
        SERVERLESS,
        "",
    ]
    lines += _ratios(sections)
    for number, section in enumerate(sections, 1):
        lines += ["", f"## {section.pair}: {section.interface}", ""]
        if stem is not None:
            title = f"Medians by load: {section.pair}, {section.interface}"
            lines += [f"![{title}]({stem}-{number}.svg)", ""]
        lines += _systems(section)
        for load in section.loads:
            lines += _table(section.rows_of(load), load)
        lines += _forced(section)
    return "\n".join(lines).rstrip("\n") + "\n"


def as_json(sections: Sequence[ComparisonSection], description: RunDescription) -> str:
    run = {
        "machine": description.machine,
        "work": description.work,
        "sections": [_section_figures(section) for section in sections],
    }
    return json.dumps(run, indent=1) + "\n"


def _section_figures(section: ComparisonSection) -> Mapping[str, object]:
    return {
        "pair": section.pair,
        "interface": section.interface,
        "weight_bytes": section.weight_bytes,
        "systems": {
            name: {
                **state.about,
                "memory": state.memory,
                "busy_when_idle": state.busy_when_idle,
            }
            for name, state in section.systems.items()
        },
        "absent": dict(section.absent),
        "rows": [
            {
                "system": row.entry.system,
                "entry": row.entry.name,
                "load": row.load,
                "gamma": row.gamma,
                "rates": row.rates,
                "error": row.error,
            }
            for row in section.rows
        ],
    }


def _systems(section: ComparisonSection) -> list[str]:
    lines = [
        f"The target's weights take {section.weight_bytes / 2**20:,.0f} MiB. *Busy* is the share "
        "of the machine while that system alone is awake and has nothing to do.",
        "",
        "| system | version | threads | runs in | memory | busy |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_system(name, state) for name, state in section.systems.items()]
    lines += [
        f"| {name} | could not be run: {_escape_cell(why)} | | | | |"
        for name, why in section.absent.items()
    ]
    return [*lines, ""]


def _system(name: str, state: SystemState) -> str:
    about = state.about
    settings = f"; {about['settings']}" if "settings" in about else ""
    return (
        f"| {name} | {about['version']} | {about['threads']} | "
        f"{about['precision']}{_escape_cell(settings)} | {state.memory / 2**20:,.0f} MiB | "
        f"{state.busy_when_idle:.1%} |"
    )


def _table(rows: Sequence[ComparisonRow], load: str) -> list[str]:
    title = f"{load}: {UNITS.get(load, 'output tokens a second')}"
    reference = next((row.texts for row in rows if row.entry.is_ours and row.error is None), ())
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


def _ratios(sections: Sequence[ComparisonSection]) -> list[str]:
    lines = [
        "| ours against the best of the others, turn by turn | ratio | spread | goal | |",
        "|---|---|---|---|---|",
    ]
    for section in sections:
        for load in section.loads:
            best, goal = section.best_peer(load), GOALS[section.interface][load]
            lines += [
                _ratio(f"{section.pair}, {section.interface}", row, best, goal)
                for row in section.compared_rows(load)
            ]
    return lines


def _ratio(where: str, row: ComparisonRow, best: ComparisonRow | None, goal: float) -> str:
    name = f"{where}: {row.load}, {row.entry.system}, {row.entry.name}"
    if best is None or row.error is not None:
        return f"| {name} | nothing to compare | | {goal} | not measured |"
    ratios = row.ratios_to(best)
    reached = "reached" if median(ratios) >= goal else "not reached"
    return (
        f"| {name}, against {best.entry.system}, {best.entry.name} | {median(ratios):.2f} | "
        f"{min(ratios):.2f} to {max(ratios):.2f} | {goal} | {reached} |"
    )


def _forced(section: ComparisonSection) -> Iterator[str]:
    """Yield a table of our forced acceptance over our plain decoding, if it was measured."""
    pairs = [
        (row, plain)
        for load in section.loads
        if (plain := section.own_plain(load))
        for row in section.forced_rows(load)
        if row.error is None
    ]
    if pairs:
        yield "| forced acceptance over our plain decoding | ratio | spread |"
        yield "|---|---|---|"
    for row, plain in pairs:
        ratios = row.ratios_to(plain)
        yield (
            f"| {row.load}, {row.entry.name} | {median(ratios):.2f} | "
            f"{min(ratios):.2f} to {max(ratios):.2f} |"
        )


def _escape_cell(text: str) -> str:
    return text.replace("|", "/")
