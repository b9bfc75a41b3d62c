"""Draw the overview of a comparison from its figures: ours and the best of each other system.

`python -m lab.bench.peers.summary peers-speed.json --out comparison.svg` reads what
`python -m lab.bench.peers` wrote, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.bench.peers.comparison import OURS, ComparisonRow, Entry
from lab.bench.peers.plot import plot
from lab.bench.peers.section import ComparisonSection

OURS_SHOWN = ("plain", "gamma auto")
"""What a user gets without choosing a gamma, and what it is compared with."""


def sections_from_json(text: str) -> list[ComparisonSection]:
    """Return the sections of a report's figures. Texts and settings are not among them."""
    return [
        ComparisonSection(
            section["pair"],
            section["interface"],
            [_row(row) for row in section["rows"]],
            systems={},
            absent=section["absent"],
        )
        for section in json.loads(text)["sections"]
    ]


def _row(row: Mapping[str, Any]) -> ComparisonRow:
    entry = Entry(row["system"], row["entry"], row["entry"])
    return ComparisonRow(entry, row["load"], row["gamma"], row["rates"], error=row["error"])


def shown_rows(section: ComparisonSection) -> Iterator[ComparisonRow]:
    """Yield ours, then the fastest row of each other system, load by load."""
    for load in section.loads:
        rows = [row for row in section.rows_of(load) if row.rates]
        yield from (
            row for row in rows if row.entry.system == OURS and row.entry.name in OURS_SHOWN
        )
        others = dict.fromkeys(row.entry.system for row in rows if not row.entry.is_ours)
        for system in others:
            own = (row for row in rows if row.entry.system == system)
            yield max(own, key=lambda row: row.median_rate)


def overview(section: ComparisonSection) -> str:
    """Return the plot of a section, without the rows that are slower ways of the same system."""
    rows = list(shown_rows(section))
    return plot(ComparisonSection(section.pair, section.interface, rows, {}, section.absent))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", type=Path, help="the .json beside a report")
    parser.add_argument("--out", type=Path, required=True, help="an SVG file")
    parser.add_argument("--section", type=int, default=1, help="which of the report, from 1")
    options = parser.parse_args(arguments)
    sections = sections_from_json(options.figures.read_text(encoding="utf-8"))
    if not 1 <= options.section <= len(sections):
        parser.error(f"{options.figures} has {len(sections)} sections, not {options.section}")
    options.out.write_text(overview(sections[options.section - 1]), encoding="utf-8")


if __name__ == "__main__":
    main()
