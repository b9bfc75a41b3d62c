"""The one line that a failed deployment is told in, out of the traces that Serve reports."""

from __future__ import annotations

import pytest

from specserve.cluster.launch import _first_refusal
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
    ("line", "kind", "said"),
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
def test_a_refusal_of_ours_is_found_in_the_trace(
    line: str, kind: type[SpecserveError], said: str
) -> None:
    found = _first_refusal(["", TRACE.format(line=line), "Deploying application failed"])
    assert (type(found), str(found)) == (kind, said)


def test_what_is_not_ours_is_told_by_its_last_line() -> None:
    found = _first_refusal(
        [TRACE.format(line="ValueError: what"), "Deploying application specserve failed"]
    )
    assert isinstance(found, Unavailable)
    assert str(found).endswith("Deploying application specserve failed")


def test_silence_is_told_as_such() -> None:
    assert str(_first_refusal([""])) == "the deployment failed: Serve does not say why"
