"""The findings as lines for people, and as values for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from specserve.terminal import GREEN, RED, YELLOW, Terminal
from specserve.tools.doctor.findings import Finding, Grade

COLOURS = {Grade.OK: GREEN, Grade.WARN: YELLOW, Grade.BAD: RED}


@dataclass(frozen=True, slots=True)
class Report:
    """In the order in which things were looked at."""

    findings: Sequence[Finding]

    @property
    def is_well(self) -> bool:
        return self._count(Grade.BAD) == 0

    def text(self, terminal: Terminal) -> str:
        width = max((len(finding.subject) for finding in self.findings), default=0)
        return "\n".join(
            [*(_line(finding, width, terminal) for finding in self.findings), self._end()]
        )

    def json(self) -> dict[str, object]:
        return {"well": self.is_well, "findings": [asdict(finding) for finding in self.findings]}

    def _end(self) -> str:
        if not self.is_well:
            return f"{self._count(Grade.BAD)} bad, {self._count(Grade.WARN)} to be warned of: it will not serve as it is"
        return (
            f"ready to serve, {self._count(Grade.WARN)} to be warned of"
            if self._count(Grade.WARN)
            else "ready to serve"
        )

    def _count(self, grade: Grade) -> int:
        return sum(finding.grade is grade for finding in self.findings)


def _line(finding: Finding, width: int, terminal: Terminal) -> str:
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    return f"{terminal.paint(f'{finding.grade:<4}', COLOURS[finding.grade])}  {finding.subject:<{width}}  {finding.found}{remedy}"
