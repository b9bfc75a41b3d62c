"""Seconds until a server is ready, and the memory of its processes.

`python -m lab.bench.start` starts `specserve serve` several times, on a Ray of its own and on one
that runs, beside the least that a Serve application takes on this machine; then servers of one and
of two replicas, whose processes' memory is counted in proportional set size (PSS): a page that
several processes share counts for each of them in part.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import psutil

from specserve.host import usable_cores
from tests.support.ray_server import free_port

READY_WITHIN_S = 300.0
GROWS = 1.01
"""Growth within a second of processes that still claim memory."""
TOKEN_MODE = {"RAY_AUTH_MODE": "token"}
PARTS = {
    "target": r"ray::TargetWorker",
    "draft": r"ray::DraftWorker",
    "engine": r"ray::ServeReplica:.*:Engine",
    "gateway": r"ray::ServeReplica:.*:Gateway",
    "worker hosts": r"ray::WorkerHost",
    "fork server": r".*fork_server",
    "Serve": r"ray::|.*haproxy",
    "Ray": r".*/ray/|.*ray\.",
    "command": r".*specserve",
}
"""Processes of a server by what their command lines begin with. The first that fits counts."""
HELLO = """
import ray
from ray import serve

@serve.deployment
class Hello:
    def __call__(self, request):
        return "hello"

ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"port": PORT})
serve.run(Hello.bind())
print("ready", flush=True)
ray.shutdown()
"""
"""The least that serves: a deployment that imports nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=5, metavar="N", help="of each kind")
    parser.add_argument("--quick", action="store_true", help="one start of one kind")
    options = parser.parse_args()
    print(f"{date.today()}, {platform.machine()}, {usable_cores()} cores\n")
    if options.quick:
        with server() as (seconds, _):
            print(row("specserve serve", [seconds]))
        return
    print("| seconds until ready | first | later, each |\n|---|---|---|")
    print(row("a bare Serve application", [bare_serve() for _ in range(options.starts)]))
    print(row("specserve serve", [start() for _ in range(options.starts)]))
    with running_ray():
        joining = [start("--join", "auto") for _ in range(options.starts)]
    print(row("specserve serve --join auto", joining))
    print("\n| PSS, MiB | " + " | ".join((*PARTS, "others", "in all")) + " |")
    print("|---" * (len(PARTS) + 3) + "|")
    for replicas in (1, 2):
        scale = (f"--set=replicas.min={replicas}", f"--set=replicas.max={replicas}")
        with server(*scale, replicas=replicas) as (_, pid):
            sizes = settled_memory(pid)
        cells = [f"{sizes[part]:.0f}" for part in (*PARTS, "others")]
        print(f"| {replicas} replicas | {' | '.join(cells)} | {sum(sizes.values()):.0f} |")


def row(name: str, seconds: Sequence[float]) -> str:
    later = ", ".join(f"{one:.1f}" for one in seconds[1:])
    return f"| {name} | {seconds[0]:.1f} | {later} |"


def bare_serve() -> float:
    """Start the least that serves; return the seconds until it is ready."""
    begun = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", HELLO.replace("PORT", str(free_port()))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seconds = time.monotonic() - begun
    if process.returncode:
        raise SystemExit("a bare Serve application does not start")
    return seconds


def start(*options: str) -> float:
    with server(*options) as (seconds, _):
        return seconds


@contextlib.contextmanager
def server(
    *options: str, replicas: int = 1, port: int | None = None
) -> Iterator[tuple[float, int]]:
    """Run `specserve serve`; yield the seconds until its engines are ready, and its pid."""
    port, begun = port or free_port(), time.monotonic()
    command = Path(sys.executable).with_name("specserve")
    process = subprocess.Popen(
        [str(command), "serve", "--port", str(port), *options],
        env=os.environ | TOKEN_MODE,
        stdout=subprocess.DEVNULL,
    )
    try:
        while num_ready(port) < replicas:
            if process.poll() is not None or time.monotonic() - begun > READY_WITHIN_S:
                raise SystemExit(f"the server was not ready after {READY_WITHIN_S:g} s")
            time.sleep(0.05)
        yield time.monotonic() - begun, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(READY_WITHIN_S)


def num_ready(port: int) -> int:
    """Return the number of engines that report, or 0 while there is no server."""
    with contextlib.suppress(OSError):
        url = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            pass
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as reply:
            found = re.search(r"^specserve_replicas (\S+)$", reply.read().decode(), re.MULTILINE)
        return int(float(found[1])) if found else 0
    return 0


@contextlib.contextmanager
def running_ray() -> Iterator[None]:
    """Run a Ray node that servers can join."""
    ray_command("start", "--head", "--num-cpus=4", "--include-dashboard=false")
    try:
        yield
    finally:
        ray_command("stop")


def ray_command(*arguments: str) -> None:
    command = Path(sys.executable).with_name("ray")
    subprocess.run(
        [str(command), *arguments],
        env=os.environ | TOKEN_MODE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )


def settled_memory(pid: int) -> Counter[str]:
    """Return the memory of a server that has claimed its caches', and so grows no more."""
    before, now = Counter[str](), memory(pid)
    while now.total() > before.total() * GROWS:
        time.sleep(1)
        before, now = now, memory(pid)
    return now


def memory(pid: int) -> Counter[str]:
    """Return the MiB of each part of a server, of which `pid` is the command's process.

    Workers and their fork server are no children of it.
    """
    own = psutil.Process(pid)
    processes = {own, *own.children(recursive=True)}
    for process in psutil.process_iter(["cmdline"]):
        if re.match(r"ray::(Target|Draft)Worker|.*fork_server", line(process)):
            processes.add(process)
    sizes = Counter[str]()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            words = line(process)
            part = next((part for part, start in PARTS.items() if re.match(start, words)), "others")
            sizes[part] += process.memory_full_info().pss / 2**20
    return sizes


def line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


if __name__ == "__main__":
    main()
