"""`make test`: the tests that start Ray and those that do not, beside one another.

Most tests compute on one thread, so the two halves need little more time together than the longer
one alone. The output of each half is printed as a whole.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

LEFT_OUT = "not gpu and not browser and not long"
HALVES = (f"not ray and {LEFT_OUT}", f"ray and {LEFT_OUT}")
NO_TESTS = 5
"""Exit status of pytest when it finds no tests, as in one half of a file's."""


def run(arguments: Sequence[str], halves: Sequence[str] = HALVES) -> int:
    """Run pytest for both halves at once, print their output, and return the exit status."""
    with tempfile.TemporaryFile() as later:
        first, second = (
            subprocess.Popen(
                [sys.executable, "-m", "pytest", "-m", half, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
            )
            for half, output in zip(halves, (None, later), strict=True)
        )
        try:
            statuses = [first.wait(), second.wait()]
        finally:
            for half in (first, second):
                half.terminate()  # after Ctrl-C
                half.wait()
        later.seek(0)
        sys.stdout.buffer.write(later.read())
        sys.stdout.flush()
    if all(status == NO_TESTS for status in statuses):
        return NO_TESTS
    return max((status for status in statuses if status != NO_TESTS), key=abs)


if __name__ == "__main__":
    # A job in the background of a shell ignores Ctrl-C, and so would what the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))
