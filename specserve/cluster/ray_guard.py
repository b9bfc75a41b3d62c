"""A process that ends a Ray of our own with us, however we end, and the group that Ray is in.

Ray's processes would otherwise be in our process group. A signal to that, as systemd and `timeout`
send it, would end them before we have taken the application down; and killed ourselves, we would
leave Serve's proxy listening. Run as a program, this file needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEEDED = ("gcs_server", "raylet")
"""Ray's names of the processes that it does not replace."""


class RayGuard:
    """The guard, which leads the process group of what Ray starts.

    It ends when this process does, and with it all of its group and whatever was started with a
    file in `directory`, which is removed.
    """

    def __init__(self, directory: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Have Ray start its processes in the guard's group."""
        from ray._private import services

        started, group = services.ConsolePopen, self._process.pid

        def start(*arguments: Any, **options: Any) -> subprocess.Popen[Any]:
            process: subprocess.Popen[Any] = started(*arguments, process_group=group, **options)
            return process

        module: Any = services
        module.ConsolePopen = start
        try:
            yield
        finally:
            module.ConsolePopen = started

    def ended_process(self) -> str | None:
        """Return the name of a process without which Ray does nothing, if it has ended."""
        from ray._private import worker

        node: Any = worker._global_node
        return next((kind for kind, _ in node.dead_processes() if kind in NEEDED), None)

    def close(self) -> None:
        """End what is left, once Ray has been shut down or its processes have ended."""
        self._process.communicate()


def main() -> None:
    """Wait until the parent has ended or closed the guard, and end what it has left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    directory = sys.argv[1]
    for process in _started_with(directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _started_with(directory: str) -> Iterator[int]:
    """Yield the processes whose command lines name a file in a directory."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"{directory}/".encode() in file.read_bytes():
                yield int(file.parent.name)


if __name__ == "__main__":
    main()
