"""Use up what a server needs, one thing at a time, and print what its clients saw.

It needs the right to mount a small disk. Each part sends requests
before, while there is nothing left, and after it was given back. A gateway is killed meanwhile,
since those that run need less than one that starts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import ray

from specserve.tools.bench.address import ServerAddress
from tests.chaos.overload import KEYS, RequestLog, counter, for_a_while
from tests.support.processes import own_processes_named
from tests.support.ray_server import served

CLIENTS, TOKENS, SECONDS = 8, 64, 12.0
TWO_GATEWAYS: dict[str, object] = {**KEYS, "replicas.gateways": 2, "replicas.min_gateways": 2}
DISK_MIB, STORE_BYTES = 128, 100 * 2**20
MEMORY_SHARE = 20
"""Percent of the machine's memory that is free below the limit that Ray gets."""
ROLES = (":Gateway", ":Engine", "TargetWorker", "DraftWorker", "haproxy", "ServeController")


@contextmanager
def full_disk(directory: str) -> Iterator[None]:
    """Fill the disk on which Ray keeps sessions and logs, and HAProxy its files."""
    ballast = Path(directory) / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**16))
        except OSError:
            pass
    yield
    ballast.unlink()


@contextmanager
def few_handles(directory: str) -> Iterator[None]:
    """Leave two file handles to each gateway and engine."""
    before: list[tuple[psutil.Process, tuple[int, int]]] = []
    for process in own_processes_named(":Gateway") + own_processes_named(":Engine"):
        limits = process.rlimit(resource.RLIMIT_NOFILE)
        before.append((process, limits))
        process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds() + 2, limits[1]))
    yield
    for process, limits in before:
        if process.is_running():
            process.rlimit(resource.RLIMIT_NOFILE, limits)


@contextmanager
def full_object_store(directory: str) -> Iterator[None]:
    """Hold more objects than the store has room for; the rest is spilled to the disk."""
    held = [ray.put(os.urandom(20 * 2**20)) for _ in range(8)]
    print(f"{len(held)} objects of 20 MiB are held", flush=True)
    yield
    held.clear()


@contextmanager
def memory_beyond_the_limit(directory: str) -> Iterator[None]:
    """Use more memory of the machine than Ray allows, in a process that Ray does not know."""
    held = bytearray(MEMORY_SHARE * psutil.virtual_memory().total // 100)
    held[:: resource.getpagesize()] = b"x" * len(held[:: resource.getpagesize()])
    yield
    held.clear()


PARTS: Mapping[str, Callable[[str], Any]] = {
    "disk": full_disk,
    "handles": few_handles,
    "objects": full_object_store,
    "memory": memory_beyond_the_limit,
}


async def seen(address: ServerAddress, when: str) -> None:
    """Send requests for a while, and print the answers."""
    log, number = RequestLog(), counter()

    async def send() -> None:
        await log.send(address, number(), max_tokens=TOKENS, seconds=60)
        await asyncio.sleep(0.05)

    await for_a_while(SECONDS, send, CLIENTS)
    failures = {
        str(stream.error or stream.body[:120]) for stream in log.streams if stream.ended is None
    }
    print(f"| {when} | {log.by_status()} | {len(log.complete)} complete | {failures or ''} |")
    print(f"  processes: {running()}", flush=True)


def running() -> dict[str, list[int]]:
    return {role: [one.pid for one in own_processes_named(role)] for role in ROLES}


@contextmanager
def small_disk() -> Iterator[str]:
    """Mount a small disk, at a short path: HAProxy's sockets lie there."""
    directory = Path(tempfile.mkdtemp(prefix="sx", dir="/tmp"))
    options = ("-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(directory))
    try:
        subprocess.run(("mount", *options), check=True)
        yield str(directory)
        subprocess.run(("umount", "-l", directory), check=True)
    finally:
        directory.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    with ExitStack() as stack:
        directory = stack.enter_context(small_disk())
        variables = {
            "RAY_TMPDIR": directory,
            "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(STORE_BYTES),
        }
        if "memory" in options.only:
            share = (psutil.virtual_memory().percent + MEMORY_SHARE) / 100
            variables |= {"RAY_memory_usage_threshold": f"{share:.3f}"}
        stack.enter_context(patch.dict(os.environ, variables))
        stack.enter_context(patch("specserve.cluster.ray_session.SHORT_TMP", directory))
        url, _ = stack.enter_context(served(TWO_GATEWAYS))
        address = ServerAddress.from_url(url)
        for name in options.only:
            asyncio.run(seen(address, f"{name}: before"))
            with PARTS[name](directory):
                asyncio.run(seen(address, f"{name}: used up"))
                for process in own_processes_named(":Gateway")[:1]:
                    process.kill()
                asyncio.run(seen(address, f"{name}: used up, and a gateway killed"))
            asyncio.run(seen(address, f"{name}: given back"))
            asyncio.run(seen(address, f"{name}: later"))


if __name__ == "__main__":
    main()
