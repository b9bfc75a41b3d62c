"""A plugin of pytest that leaves tests out by name, each with its reason, and reports the rest.

It runs in a suite's own environment, so it needs pytest and the standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conformance.checks import FAILED, PASSED, SKIPPED, CheckResult, Reporter

DIFFERENT = "different"
"""Outcome of a test that fails for a reason that is named."""
REPORT = "SUITE_REPORT"
"""Environment variable with the file of the report."""


@dataclass(frozen=True, slots=True)
class Exceptions:
    """Tests that do not run, and tests that fail because the server differs, each with a reason.

    A name is a file, a test of a file, or a test with its parameters in brackets.
    """

    left_out: Mapping[str, Sequence[str]]
    different: Mapping[str, Sequence[str]]
    left_out_parameters: Mapping[str, str] = field(default_factory=dict)
    """Reasons by a part of a test's parameters."""

    def why_left_out(self, name: str) -> str | None:
        """Return why a test is left out; None if it runs."""
        parameters = name.partition("[")[2]
        return _reason(self.left_out, name) or next(
            (why for part, why in self.left_out_parameters.items() if part in parameters), None
        )

    def why_different(self, name: str) -> str | None:
        """Return why a test fails; None if it must pass."""
        return _reason(self.different, name)


def _reason(reasons: Mapping[str, Sequence[str]], name: str) -> str | None:
    test = name.partition("[")[0]
    fitting = (name, test, test.partition("::")[0])
    return next((why for why, names in reasons.items() if set(fitting) & set(names)), None)


@dataclass(slots=True)
class SuitePlugin:
    """Skips what is left out, and writes an outcome for every test."""

    exceptions: Exceptions
    prefix: str
    reporter: Reporter = field(default_factory=lambda: Reporter(Path(os.environ[REPORT])))

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        name = collection_path.as_posix().partition(f"/{self.prefix}")[2]
        if reason := self.exceptions.why_left_out(name):
            self.reporter.add(CheckResult(name, SKIPPED, reason))
            return True
        return None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if reason := self.exceptions.why_left_out(self._name(item.nodeid)):
                item.add_marker(pytest.mark.skip(reason=reason), append=False)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.reporter.add(CheckResult(self._name(report.nodeid), FAILED, report.longreprtext))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = self._name(report.nodeid)
        different = self.exceptions.why_different(name)
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self.reporter.add(CheckResult(name, SKIPPED, reason.removeprefix("Skipped: ")))
        elif report.failed:
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            error = " ".join(line[2:] for line in lines)
            self.reporter.add(
                CheckResult(name, DIFFERENT if different else FAILED, different or error)
            )
        elif report.when == "call":
            stale = CheckResult(name, FAILED, f"it passes, but is listed: {different}")
            self.reporter.add(stale if different else CheckResult(name, PASSED))

    def _name(self, nodeid: str) -> str:
        return nodeid.removeprefix(self.prefix)
