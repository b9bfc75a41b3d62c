"""Outcomes of several runs must add up in the file."""

from __future__ import annotations

from pathlib import Path

from lab.chaos.check import CheckCounts
from lab.chaos.faults import KILLED, Fault
from lab.chaos.report import ChaosOutcome
from tests.chaos.outcomes import OutcomeFile


def outcome(pauses: tuple[float, ...], *, lost: int = 0) -> ChaosOutcome:
    faults = tuple(Fault(float(i), "draft", KILLED, 1) for i in range(len(pauses)))
    return ChaosOutcome(faults, CheckCounts(5, lost=lost), pauses, (0.02, 0.04), 60.0)


def test_rows_count_all_runs_of_a_role_together(tmp_path: Path) -> None:
    file = OutcomeFile(tmp_path / "outcomes.jsonl")
    file.append("draft", outcome((0.1, 0.2)))
    file.append("target", outcome((1.0,)))
    file.append("draft", outcome((0.3,), lost=1))
    draft, target = (row.split(" | ") for row in file.rows())
    assert draft[:4] == ["| draft", "3", "11", "1"]
    assert draft[7:9] == ["0.20 s", "0.30 s"]
    assert target[:4] == ["| target", "1", "5", "0"]
