"""How `specserve serve` ends: in each way, under load, and what is left of it then.

`python -m tests.chaos.ends`: each start has two clients that stream until the server has gone.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import IO

import psutil

from specserve.host import usable_cores
from tests.support.processes import command_of, name_of, own_processes
from tests.support.ray_server import free_port

KEYS = ("demo.size=none", "target.threads=1", "draft.threads=1")
CLIENTS = 2
GONE_WITHIN_S = 60.0
LIMIT_S = 600.0
BODY = {"prompt": "def read_lines(path):", "max_tokens": 512, "ignore_eos": True, "stream": True}

Server = subprocess.Popen[str]


def _interrupt(server: Server) -> None:
    os.killpg(server.pid, signal.SIGINT)


def _terminate_group(server: Server) -> None:
    os.killpg(server.pid, signal.SIGTERM)


def _terminate_twice(server: Server) -> None:
    server.terminate()
    os.killpg(server.pid, signal.SIGTERM)


def _kill(name: str) -> Callable[[Server], None]:
    """Return a function that kills the processes of a name, or with a title of Ray's."""

    def kill(server: Server) -> None:
        found = []
        for one in own_processes(server.pid):
            title = command_of(one).rstrip()
            role = title.rpartition(":")[2].partition(".")[0]
            if name in (name_of(one), role) or title.startswith(name):
                found.append(one)
        assert found, f"{name} does not run"
        for one in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    return kill


def _kill_and_terminate(name: str) -> Callable[[Server], None]:
    def end(server: Server) -> None:
        _kill(name)(server)
        server.terminate()

    return end


KILLED = {
    "Serve's controller": "ServeController",
    "Serve's proxy": "ProxyActor",
    "HAProxy": "haproxy",
    "the gateway": "Gateway",
    "the engine": "Engine",
    "the target's worker": "TargetWorker",
    "Ray's raylet": "raylet",
    "Ray's gcs_server": "gcs_server",
    "every `ray::` process": "ray::",
}
WAYS: Mapping[str, Callable[[Server], None]] = {
    "Ctrl-C": _interrupt,
    "SIGTERM": subprocess.Popen.terminate,
    "SIGTERM to its group": _terminate_group,
    "SIGTERM to it and its group, as `timeout`": _terminate_twice,
    "kill -9": subprocess.Popen.kill,
    "kill -9 of Ray's raylet": _kill("raylet"),
    "kill -9 of Ray's gcs_server": _kill("gcs_server"),
    **{
        f"kill -9 of {what}, then SIGTERM": _kill_and_terminate(name)
        for what, name in KILLED.items()
    },
}


@dataclass(frozen=True, slots=True)
class End:
    """One end: its exit code, its seconds, and what was left."""

    code: int
    exited_s: float  # until the command had ended
    gone_s: float  # until all of its processes had
    processes: int  # that were left after a minute
    ports: int
    files: int
    traceback: bool


def end_once(end: Callable[[Server], None], *, is_empty: bool) -> End:
    """Start a server, end it while clients stream, and return what was seen."""
    port, before = free_port(), _files()
    keys = (*KEYS, "replicas.min=0") if is_empty else KEYS
    settings = [word for key in keys for word in ("--set", key)]
    command = [sys.executable, "-m", "specserve", "serve", "--port", str(port), *settings]
    with tempfile.TemporaryFile("w+") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, text=True, start_new_session=True
        )
        with contextlib.nullcontext() if is_empty else _clients(server, port, output):
            _wait_until_ready(server, output)
            if not is_empty:
                time.sleep(2.0)  # in which the clients' streams begin
            processes = own_processes(server.pid)
            started = time.monotonic()
            end(server)
            code = server.wait(LIMIT_S)
            exited = time.monotonic() - started
            _, left = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
            gone = time.monotonic() - started
        output.seek(0)
        printed = output.read()
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    files = len(_files() - before)
    return End(code, exited, gone, len(left), _listens(port), files, "Traceback" in printed)


def _wait_until_ready(server: Server, output: IO[str]) -> None:
    until = time.monotonic() + LIMIT_S
    while "curl " not in _printed(output):
        if server.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the server did not start: {_printed(output)}")
        time.sleep(0.2)


def _printed(output: IO[str]) -> str:
    return os.pread(output.fileno(), 2**20, 0).decode(errors="replace")


@contextlib.contextmanager
def _clients(server: Server, port: int, output: IO[str]) -> Iterator[None]:
    """Stream from the server, once it is ready, until it has ended."""

    def stream() -> None:
        while server.poll() is None:
            if "curl " not in _printed(output):
                time.sleep(0.2)
                continue
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(BODY).encode(),
                {"Content-Type": "application/json"},
            )
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                urllib.request.urlopen(request, timeout=10) as answer,
            ):
                answer.read()

    threads = [threading.Thread(target=stream, daemon=True) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def _files() -> set[Path]:
    return set(Path("/tmp").glob("specserve-*"))


def _listens(port: int) -> int:
    return sum(
        one.status == psutil.CONN_LISTEN and one.laddr.port == port
        for one in psutil.net_connections("tcp")
    )


def row(way: str, ends: Sequence[End]) -> str:
    codes = ", ".join(str(code) for code in sorted({end.code for end in ends}))
    exited, gone = ([one.exited_s for one in ends], [one.gone_s for one in ends])
    left = (sum(getattr(end, name) for end in ends) for name in ("processes", "ports", "files"))
    return (
        f"| {way} | {len(ends)} | {codes} | {median(exited):.1f} ({max(exited):.1f}) "
        f"| {median(gone):.1f} ({max(gone):.1f}) | {', '.join(map(str, left))} "
        f"| {sum(end.traceback for end in ends)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="one end of a server without engines")
    options = parser.parse_args()
    times = 1 if options.quick else options.times
    ways = dict([next(iter(WAYS.items()))]) if options.quick else WAYS
    load = os.getloadavg()[0]
    print(
        f"{date.today()}, {platform.machine()}, {usable_cores()} cores, load before {load:.1f}\n\n"
        "| how | times | exit codes | s until it had ended (most) | s until all had (most) "
        "| processes, ports and files left | tracebacks |\n|---|---|---|---|---|---|---|"
    )
    for way, end in ways.items():
        ends = [end_once(end, is_empty=options.quick) for _ in range(times)]
        print(row(way, ends), flush=True)


if __name__ == "__main__":
    main()
