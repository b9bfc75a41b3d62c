"""A finding: what was looked at, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from specserve.errors import SpecserveError, first_line


class Grade(StrEnum):
    OK = "ok"
    WARN = "warn"  # it runs, though not as well as it could
    BAD = "bad"  # it does not run


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. What is ok needs no remedy."""

    grade: Grade
    subject: str
    found: str
    remedy: str = ""


Look = Callable[[], Iterable[Finding]]


def ok(subject: str, found: str) -> Finding:
    return Finding(Grade.OK, subject, found)


def warn(subject: str, found: str, remedy: str) -> Finding:
    return Finding(Grade.WARN, subject, found, remedy)


def bad(subject: str, found: str, remedy: str) -> Finding:
    return Finding(Grade.BAD, subject, found, remedy)


def guarded(subject: str, look: Look) -> Iterator[Finding]:
    """What is refused is a finding, and so is a check that fails: neither keeps the others from being made."""
    try:
        yield from look()
    except SpecserveError as error:
        yield bad(subject, str(error), "")
    except Exception as error:  # the edge of a check, as of a process
        yield warn(
            subject, f"this could not be looked at: {type(error).__name__}: {first_line(error)}", ""
        )


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
