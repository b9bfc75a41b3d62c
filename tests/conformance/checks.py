"""Checks of one client, run one after another and reported as lines of JSON.

It runs in a client's own environment, so it needs the standard library only.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

SCRIPTED = "scripted"
DEMO = "demo"
CHAT = "smollm2"
MODEL = "demo"
PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
MAX_REASON = 300


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server to check, and what engine is behind its gateway: SCRIPTED, DEMO or CHAT."""

    root: str
    engine: str

    @property
    def url(self) -> str:
        """Base URL as clients of OpenAI take it."""
        return f"{self.root}/v1"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Outcome of one check: PASSED, FAILED or SKIPPED, and why."""

    name: str
    outcome: str
    reason: str = ""


class SkipError(Exception):
    """A check that does not apply, with the reason."""


Check = Callable[[Endpoint], Awaitable[None] | None]


@dataclass(slots=True)
class Reporter:
    """The file in which a program leaves versions and results, a line for each."""

    path: Path

    def add_version(self, distribution: str) -> None:
        self._append({"version": f"{distribution} {version(distribution)}"})

    def add(self, result: CheckResult) -> None:
        reason = " ".join(result.reason.split())[:MAX_REASON]
        self._append({"name": result.name, "outcome": result.outcome, "reason": reason})

    def _append(self, line: dict[str, str]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@dataclass(slots=True)
class CheckList:
    """The checks of one program, each a function that raises if it fails.

    Use it as a decorator; `scripted` is for checks that depend on what the model says.
    """

    distributions: tuple[str, ...]
    checks: list[tuple[Check, str | None]] = field(default_factory=list)

    def __call__(self, check: Check) -> Check:
        self.checks.append((check, None))
        return check

    def scripted(self, check: Check) -> Check:
        self.checks.append((check, SCRIPTED))
        return check

    def main(self) -> None:
        endpoint, reporter = arguments(self.distributions)
        for check, engine in self.checks:
            if engine in (None, endpoint.engine):
                reporter.add(_run(check, endpoint))


def arguments(distributions: tuple[str, ...]) -> tuple[Endpoint, Reporter]:
    """Return what the command line of a program says; report the versions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True, help="URL of the server")
    parser.add_argument("--engine", choices=(SCRIPTED, DEMO, CHAT), required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    reporter = Reporter(options.report)
    for distribution in distributions:
        reporter.add_version(distribution)
    return Endpoint(options.root, options.engine), reporter


def _run(check: Check, endpoint: Endpoint) -> CheckResult:
    name = check.__name__.replace("_", " ")
    try:
        pending = check(endpoint)
        if inspect.iscoroutine(pending):
            asyncio.run(pending)
    except SkipError as skip:
        return CheckResult(name, SKIPPED, str(skip))
    except Exception as error:
        said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        return CheckResult(name, FAILED, f"{type(error).__name__}: {said}")
    return CheckResult(name, PASSED)
