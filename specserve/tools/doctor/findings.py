"""A finding of a check: the subject, what was found, and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from specserve.errors import SpecserveError, first_line


class Grade(StrEnum):
    """Severity: `warn` runs, but not as well as it could; `bad` does not run."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A finding that is ok needs no remedy."""

    grade: Grade
    subject: str
    found: str
    remedy: str = ""


Check = Callable[[], Iterable[Finding]]


def ok(subject: str, found: str) -> Finding:
    return Finding(Grade.OK, subject, found)


def warn(subject: str, found: str, remedy: str) -> Finding:
    return Finding(Grade.WARN, subject, found, remedy)


def bad(subject: str, found: str, remedy: str) -> Finding:
    return Finding(Grade.BAD, subject, found, remedy)


def guarded(subject: str, check: Check) -> Iterator[Finding]:
    """Run a check; turn its exception into a finding, so that the other checks still run."""
    try:
        yield from check()
    except SpecserveError as error:
        yield bad(subject, str(error), "")
    except Exception as error:  # a failing check must not end the report
        yield warn(
            subject, f"this could not be looked at: {type(error).__name__}: {first_line(error)}", ""
        )


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
