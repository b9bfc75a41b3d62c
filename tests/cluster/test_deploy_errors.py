"""One line of error for a failed deployment, found in the tracebacks that Serve reports."""

from __future__ import annotations

import pytest

from specserve.cluster.launch import _first_error
from specserve.errors import ModelError, SpecserveError, TooLittleMemory, Unavailable

TRACE = """The deployment failed to start 3 times in a row. Error:
Traceback (most recent call last):
  File "group.py", line 1, in _answer
    raise cause
{line}

During handling of the above exception, another exception occurred:
RuntimeError: Traceback (most recent call last):
"""


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        (
            "specserve.errors.ModelError: a worker could not start: no such file",
            ModelError,
            "a worker could not start: no such file",
        ),
        (
            "specserve.errors.TooLittleMemory: not a single page fits.",
            TooLittleMemory,
            "not a single page fits.",
        ),
    ],
)
def test_our_own_error_is_found_in_the_traceback(
    line: str, kind: type[SpecserveError], message: str
) -> None:
    found = _first_error(["", TRACE.format(line=line), "Deploying application failed"])
    assert (type(found), str(found)) == (kind, message)


def test_a_foreign_error_is_shown_by_its_last_line() -> None:
    found = _first_error(
        [TRACE.format(line="ValueError: what"), "Deploying application specserve failed"]
    )
    assert isinstance(found, Unavailable)
    assert str(found).endswith("Deploying application specserve failed")


def test_a_failure_without_messages_says_so() -> None:
    assert str(_first_error([""])) == "the deployment failed: Serve does not say why"
