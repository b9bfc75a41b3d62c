"""The state of a process must be found: it runs, is stopped, or has gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from specserve.cluster.engine.process_state import process_runs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def becomes(pid: int, expected: bool) -> bool:
    """Wait until the process runs, or does not; return False if that takes long."""
    until = time.monotonic() + 20
    while process_runs(pid) is not expected and time.monotonic() < until:
        time.sleep(0.005)
    return process_runs(pid) is expected


def test_a_stopped_process_does_not_run_until_it_is_continued(
    process: subprocess.Popen[bytes],
) -> None:
    assert process_runs(process.pid)
    os.kill(process.pid, signal.SIGSTOP)
    assert becomes(process.pid, False)
    os.kill(process.pid, signal.SIGCONT)
    assert becomes(process.pid, True)


def test_a_dead_process_does_not_run_before_or_after_it_is_waited_for(
    process: subprocess.Popen[bytes],
) -> None:
    process.kill()
    assert becomes(process.pid, False)
    process.wait()
    assert process_runs(process.pid) is False
