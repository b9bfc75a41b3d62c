"""Outcomes of chaos runs in a file, so that the faults of several runs count together."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from lab.chaos.check import CheckCounts
from lab.chaos.faults import Fault
from lab.chaos.report import ChaosOutcome, table_row


class OutcomeFile:
    """A JSON line for each outcome: outcomes of earlier runs, and of this one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, name: str, outcome: ChaosOutcome) -> None:
        """Add an outcome. Gaps are kept in milliseconds, since there is one for each token."""
        fields = dataclasses.asdict(outcome)
        fields["pauses"] = [round(pause, 4) for pause in outcome.pauses]
        fields["gaps"] = [round(1e3 * gap) for gap in outcome.gaps]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **fields}, separators=(",", ":")) + "\n")

    def rows(self) -> list[str]:
        """Return a row of the table for each name, over all of its outcomes."""
        outcomes: dict[str, ChaosOutcome] = {}
        for line in self._path.read_text(encoding="utf-8").splitlines():
            name, outcome = _decode(json.loads(line))
            outcomes[name] = merged(outcomes[name], outcome) if name in outcomes else outcome
        return [table_row(name, outcome) for name, outcome in outcomes.items()]


def merged(one: ChaosOutcome, other: ChaosOutcome) -> ChaosOutcome:
    """Return the outcome of two runs as if they had been one."""
    counts = {
        field.name: getattr(one.counts, field.name) + getattr(other.counts, field.name)
        for field in dataclasses.fields(CheckCounts)
    }
    return ChaosOutcome(
        one.faults + other.faults,
        CheckCounts(**counts),
        one.pauses + other.pauses,
        one.gaps + other.gaps,
        one.seconds + other.seconds,
        one.first_failure or other.first_failure,
    )


def _decode(fields: dict[str, Any]) -> tuple[str, ChaosOutcome]:
    return fields.pop("name"), ChaosOutcome(
        faults=tuple(Fault(**fault) for fault in fields["faults"]),
        counts=CheckCounts(**fields["counts"]),
        pauses=tuple(fields["pauses"]),
        gaps=tuple(gap / 1e3 for gap in fields["gaps"]),
        seconds=fields["seconds"],
        first_failure=fields["first_failure"],
    )
