"""`make test`: two lanes of tests beside one another, one of which starts with those on Ray.

Most tests compute on one thread, so the lanes need little more time together than the longer one
alone; the proofs run behind the tests on Ray, which makes them about equally long. The output of
the first lane is printed as it comes, that of the second as a whole.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO

LEFT_OUT = "not gpu and not browser and not long"
LANES = (
    (f"not ray and not proofs and {LEFT_OUT}",),
    (f"ray and {LEFT_OUT}", f"proofs and not ray and {LEFT_OUT}"),
)
"""Marks of the tests of each lane, in their order."""
NO_TESTS = 5
"""Exit status of pytest when it finds no tests, as in some parts of a file's."""


def run(arguments: Sequence[str], lanes: Sequence[Sequence[str]] = LANES) -> int:
    """Run pytest for all lanes at once, print their output, and return the exit status."""
    with tempfile.TemporaryFile() as later:
        running = [
            _Lane(marks, arguments, output)
            for marks, output in zip(lanes, (None, later), strict=True)
        ]
        try:
            statuses = [status for lane in running for status in lane.wait()]
        finally:
            for lane in running:
                lane.end()  # after Ctrl-C
        later.seek(0)
        sys.stdout.buffer.write(later.read())
        sys.stdout.flush()
    if all(status == NO_TESTS for status in statuses):
        return NO_TESTS
    return max((status for status in statuses if status != NO_TESTS), key=abs)


class _Lane:
    """Runs of pytest, one after the other, in a thread that waits for them."""

    def __init__(
        self, marks: Sequence[str], arguments: Sequence[str], output: IO[bytes] | None
    ) -> None:
        self._marks, self._arguments, self._output = marks, arguments, output
        self._statuses: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ended = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait(self) -> Sequence[int]:
        """Return the exit status of each run when all are over."""
        while self._thread.is_alive():
            self._thread.join(0.5)  # Ctrl-C comes between two waits
        return self._statuses

    def end(self) -> None:
        """Terminate the present run, and start no other."""
        self._is_ended = True
        if self._process is not None:
            self._process.terminate()
        self._thread.join()

    def _run(self) -> None:
        for mark in self._marks:
            if self._is_ended:
                return
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-m", mark, *self._arguments],
                stdout=self._output,
                stderr=subprocess.STDOUT if self._output else None,
            )
            self._statuses.append(self._process.wait())


if __name__ == "__main__":
    # A job in the background of a shell ignores Ctrl-C, and so would what the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))
