"""`python -m tests.chaos.overload`: five times the capacity, a step of load, a mixed soak test.

Each part prints its figures for docs/measurements/reliability.md. `--only overload step soak`
picks parts; `--seconds` is the length of each.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from lab.chaos.report import percentile_of
from specserve.tools.bench.address import ServerAddress
from specserve.tools.bench.prompts import CODE_PROMPTS
from specserve.tools.bench.streams import Stream
from tests.chaos.refusing_server import refusing_server
from tests.support.processes import command_of, own_processes, own_processes_named
from tests.support.ray_server import served

TOKENS, RUNNING, QUEUED, LIMIT_S = 64, 8, 8, 30.0
KEYS: dict[str, object] = {"target.threads": 1, "draft.threads": 1, "cache.pages": 4096}
ACTORS = ("Gateway", "Engine", "TargetWorker", "DraftWorker")


@dataclass(slots=True)
class RequestLog:
    """Requests of a load and their streams."""

    streams: list[Stream] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)

    async def send(
        self,
        address: ServerAddress,
        number: int,
        *,
        max_tokens: int = TOKENS,
        seconds: float = LIMIT_S * 2,
    ) -> None:
        stream, prompt = Stream(), f"# {number}\n{CODE_PROMPTS[number % len(CODE_PROMPTS)]}"
        self.streams.append(stream)
        self.arrived.append(time.monotonic())
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        try:
            async with asyncio.timeout(seconds):
                await address.post("/v1/completions", body, into=stream)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            stream.error = stream.error or {"message": f"{type(error).__name__}: {error}"}

    def by_status(self) -> dict[int, int]:
        """Count the requests by HTTP status; 0 is no answer."""
        statuses = [stream.status for stream in self.streams]
        return {status: statuses.count(status) for status in sorted(set(statuses))}

    @property
    def complete(self) -> list[Stream]:
        return [
            stream
            for stream in self.streams
            if stream.status == 200 and stream.num_finals == 1 and stream.ended is not None
        ]

    @property
    def waits(self) -> list[float]:
        """Seconds to the first token."""
        return [stream.times[0] - stream.sent for stream in self.complete]

    @property
    def refusals(self) -> list[float]:
        return [
            stream.ended - stream.sent
            for stream in self.streams
            if stream.status == 429 and stream.ended is not None
        ]


async def for_a_while(seconds: float, client: Callable[[], Awaitable[None]], clients: int) -> None:
    until = time.monotonic() + seconds

    async def again() -> None:
        while time.monotonic() < until:
            await client()

    await asyncio.gather(*(again() for _ in range(clients)))


def processes() -> dict[str, psutil.Process]:
    found: dict[str, psutil.Process] = {}
    for process in own_processes():
        title = command_of(process)
        found |= {name: process for name in ACTORS if title.startswith("ray::") and name in title}
    return found


def memory() -> dict[str, float]:
    return {name: process.memory_info().rss / 2**20 for name, process in processes().items()}


def counter() -> Callable[[], int]:
    return iter(range(10**9)).__next__


async def overload(address: ServerAddress, seconds: float) -> Iterator[str]:
    """Measure the capacity in closed loops, then send five times as much in an open loop.

    A refused request is not sent again, and requests do not wait for one another. The clients of
    the open loop take their share of the machine; so the capacity is measured once more beside as
    many requests to a process that refuses all of them.
    """
    next_number = counter()
    alone = await capacity(address, min(60.0, seconds), next_number)
    with refusing_server() as sink:
        refused = RequestLog()
        beside, (_, waiting) = await asyncio.gather(
            capacity(address, min(60.0, seconds), next_number),
            open_loop(sink, refused, 4 * alone, min(60.0, seconds), next_number),
        )
        await asyncio.gather(*waiting)
    log, before = RequestLog(), memory()
    started = time.monotonic()
    end, tasks = await open_loop(address, log, 5 * alone, seconds, next_number)
    in_time = sum(stream.ended is not None and stream.ended < end for stream in log.complete)
    goodput = in_time / (end - started)
    await asyncio.gather(*tasks)
    broken = [
        stream.error
        for stream in log.streams
        if stream.status not in (200, 429) or (stream.status == 200 and stream.num_finals != 1)
    ]
    return iter(
        (
            f"peak, closed loop: {alone:.2f} requests/s of {TOKENS} tokens; {beside:.2f} beside "
            f"{4 * alone:.1f} requests/s to a process that refuses them",
            f"open loop at {5 * alone:.1f} requests/s for {seconds:.0f} s: "
            f"{len(log.streams)} requests, by status {log.by_status()}",
            f"goodput {goodput:.2f} requests/s, {goodput / alone:.2f} of the peak, "
            f"{goodput / beside:.2f} of the peak beside the refusing process",
            f"time to first token of those that were served, s: {spread(log.waits)}",
            f"refusals, s: {spread(log.refusals)}; "
            f"by the refusing process {spread(refused.refusals)}",
            f"neither served nor refused: {len(broken)} {broken[:2]}",
            f"memory, MiB: {growth(before, memory())}",
        )
    )


async def capacity(address: ServerAddress, seconds: float, next_number: Callable[[], int]) -> float:
    """Return the requests that a closed loop completes per second."""
    log, started = RequestLog(), time.monotonic()
    await for_a_while(seconds, lambda: log.send(address, next_number()), RUNNING + QUEUED // 2)
    return len(log.complete) / (time.monotonic() - started)


async def open_loop(
    address: ServerAddress,
    log: RequestLog,
    rate: float,
    seconds: float,
    next_number: Callable[[], int],
) -> tuple[float, list[asyncio.Task[None]]]:
    """Send requests at random times; return the end of the last interval, and what still runs."""
    rng, tasks = random.Random(1), list[asyncio.Task[None]]()
    started = due = time.monotonic()
    while due < started + seconds:
        due += rng.expovariate(rate)
        await asyncio.sleep(due - time.monotonic())
        tasks.append(asyncio.create_task(log.send(address, next_number())))
    return time.monotonic(), tasks


async def step(address: ServerAddress, seconds: float) -> Iterator[str]:
    """Run few clients, many, and few again, for a third of the time each."""
    next_number, logs, done = counter(), [RequestLog() for _ in range(3)], False
    sizes: list[tuple[float, int]] = []

    async def watch() -> None:
        while not done:
            sizes.append((time.monotonic(), int(await gauge(address, "replicas"))))
            await asyncio.sleep(1.0)

    async def send(log: RequestLog) -> None:
        await log.send(address, next_number())

    started, watching = time.monotonic(), asyncio.create_task(watch())
    for log, clients in zip(logs, (2, 24, 2), strict=True):
        await for_a_while(seconds / 3, partial(send, log), clients)
    done = True
    await watching
    changes = [
        f"{then - started:.0f} s: {now}"
        for (_, before), (then, now) in pairwise(sizes)
        if now != before
    ]
    failed = [
        sum(stream.status != 200 or stream.num_finals != 1 for stream in log.streams)
        for log in logs
    ]
    waits = ", ".join(
        f"{median(log.waits):.2f} (p99 {percentile_of(log.waits, 99):.2f})" for log in logs
    )
    return iter(
        (
            f"replicas: {sizes[0][1]} at first; {'; '.join(changes)}",
            f"time to first token, s: {waits}",
            f"failed: {failed}",
        )
    )


async def gauge(address: ServerAddress, name: str) -> float:
    """Return the largest value of the gauge's samples."""
    text = (await address.get("/metrics")).body.decode()
    return max(
        (
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"specserve_{name}"
        ),
        default=0,
    )


async def soak(address: ServerAddress, seconds: float) -> Iterator[str]:
    """Send requests of random lengths, with clients that leave in the middle.

    The memory in use is read every minute, with no request under way.
    """
    rng, next_number, log = random.Random(2), counter(), RequestLog()
    footprints: list[dict[str, float]] = []

    async def client() -> None:
        leaves = rng.random() < 0.3
        await log.send(
            address,
            next_number(),
            max_tokens=rng.randint(1, 300),
            seconds=rng.uniform(0.05, 2.0) if leaves else 120.0,
        )

    started = time.monotonic()
    while time.monotonic() < started + seconds:
        await for_a_while(55.0, client, 8)
        await asyncio.sleep(5.0)
        cache_usage = await gauge(address, "kv_cache_usage_perc")
        footprints.append(footprint() | {"cache in use": cache_usage})
    lines = [
        f"{len(log.streams)} requests in {seconds / 60:.0f} minutes, by status {log.by_status()}"
    ]
    for name in footprints[0]:
        series = [one[name] for one in footprints]
        late = slope(series[len(series) // 3 :])
        lines.append(
            f"{name}: {series[0]:.1f} at first, {series[-1]:.1f} at last, "
            f"{late:+.3f} a minute in the last two thirds"
        )
    return iter(lines)


def footprint() -> dict[str, float]:
    found = processes()
    sizes = {f"{name} MiB": process.memory_info().rss / 2**20 for name, process in found.items()}
    handles = {f"{name} file handles": float(process.num_fds()) for name, process in found.items()}
    handles |= {
        f"{name} sockets": float(len(process.net_connections())) for name, process in found.items()
    }
    return sizes | handles | {"processes": float(len(own_processes_named("ray::")))}


def slope(series: list[float]) -> float:
    """Return the slope of the least-squares line through the values."""
    middle, mean = (len(series) - 1) / 2, sum(series) / len(series)
    spread = sum((i - middle) ** 2 for i in range(len(series)))
    return (
        sum((i - middle) * (value - mean) for i, value in enumerate(series)) / spread
        if spread
        else 0.0
    )


def growth(before: dict[str, float], after: dict[str, float]) -> str:
    return ", ".join(
        f"{name} {before[name]:.0f} to {after[name]:.0f}" for name in before if name in after
    )


def spread(seconds: list[float]) -> str:
    return (
        f"p50 {median(seconds):.3f}, p99 {percentile_of(seconds, 99):.3f}, most {max(seconds):.3f}"
        if seconds
        else "none"
    )


Part = Callable[[ServerAddress, float], Coroutine[Any, Any, Iterator[str]]]
PARTS: dict[str, tuple[Part, float, dict[str, object]]] = {
    "overload": (
        overload,
        300.0,
        {
            "limits.max_running": RUNNING,
            "limits.max_queued": QUEUED,
            "limits.request_timeout_s": LIMIT_S,
        },
    ),
    "step": (
        step,
        900.0,
        {
            "replicas.max": 3,
            "replicas.target_ongoing_requests": 8,
            "replicas.upscale_delay_s": 5,
            "replicas.downscale_delay_s": 60,
        },
    ),
    # So few pages that all are written, and count as memory, within the first minutes.
    "soak": (soak, 1800.0, {"cache.pages": 1024}),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float)
    given = parser.parse_args()
    for name in given.only:
        part, seconds, keys = PARTS[name]
        with served({**KEYS, **keys}) as (url, _):
            print(f"\n## {name}\n", flush=True)
            for line in asyncio.run(part(ServerAddress.from_url(url), given.seconds or seconds)):
                print(f"- {line}", flush=True)


if __name__ == "__main__":
    main()
