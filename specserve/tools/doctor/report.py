"""Findings as lines for people and as values for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.text import Text

from specserve.tools.doctor.findings import Finding, Grade

COLOURS = {Grade.OK: "green", Grade.WARN: "yellow", Grade.BAD: "red"}


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Findings in the order of the checks."""

    findings: Sequence[Finding]

    @property
    def is_well(self) -> bool:
        return self._count(Grade.BAD) == 0

    def text(self) -> Text:
        """Return a line for each finding, and the conclusion."""
        width = max((len(finding.subject) for finding in self.findings), default=0)
        lines = (_line(finding, width) for finding in self.findings)
        return Text("\n").join([*lines, Text(self._conclusion())])

    def json(self) -> dict[str, object]:
        return {"well": self.is_well, "findings": [asdict(finding) for finding in self.findings]}

    def _conclusion(self) -> str:
        bad, warnings = self._count(Grade.BAD), self._count(Grade.WARN)
        if bad:
            return f"{bad} bad, {warnings} to be warned of: it will not serve as it is"
        return f"ready to serve, {warnings} to be warned of" if warnings else "ready to serve"

    def _count(self, grade: Grade) -> int:
        return sum(finding.grade is grade for finding in self.findings)


def _line(finding: Finding, width: int) -> Text:
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    grade = f"{finding.grade:<4}", COLOURS[finding.grade]
    return Text.assemble(grade, f"  {finding.subject:<{width}}  {finding.found}{remedy}")
