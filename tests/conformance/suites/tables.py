"""The tables of the suites on docs/measurements/conformance.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tests.conformance.checks import FAILED, PASSED, SKIPPED
from tests.conformance.suites.selection import DIFFERENT
from tests.conformance.suites.sources import SuiteRun

WORDS = {SKIPPED: "left out", DIFFERENT: "different", FAILED: "failed"}
"""What the page calls an outcome other than PASSED."""


def tables(runs: Sequence[SuiteRun]) -> Iterator[str]:
    """Yield a table of counts, and one of the reasons."""
    yield "| suite, from | tests | passed | different | left out | failed |"
    yield "|---|---|---|---|---|---|"
    for run in runs:
        counts = [run.num(outcome) for outcome in (PASSED, DIFFERENT, SKIPPED, FAILED)]
        cells = (run.suite.title, len(run.results), *counts)
        yield f"| {' | '.join(map(str, cells))} |"
    yield from ("", "| suite | outcome | tests | reason |", "|---|---|---|---|")
    for run in runs:
        reasons = Counter(
            (WORDS[result.outcome], result.reason)
            for result in run.results
            if result.outcome != PASSED
        )
        for (outcome, reason), count in sorted(reasons.items()):
            yield f"| {run.suite.name} | {outcome} | {count} | {_cell(reason)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
