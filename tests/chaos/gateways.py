"""`python -m tests.chaos.gateways`: gateways killed, stopped and cut off under load.

A row of the table for each kind of fault: the time until the engine runs no sequence of the gateway
any more, and what the streams of other gateways saw. A client's stream belongs to the gateway for
which the engine runs its seed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specserve.cluster.launch import handle
from specserve.tools.bench.address import ServerAddress
from specserve.tools.bench.prompts import CODE_PROMPTS
from tests.chaos.gateway_outcomes import HEAD, Outcome, Request, Strike, added
from tests.chaos.relays import RelayHub
from tests.chaos.watched_engine import Snapshot, WatchedEngine
from tests.support.processes import own_processes_named
from tests.support.ray_server import served

GATEWAYS, CLIENTS, TOKENS = 4, 8, 300
KEYS: dict[str, object] = {
    "target.dtype": "bfloat16",  # whose bits are the same in any batch, on any processor
    "target.threads": 1,
    "draft.threads": 1,
    "cache.pages": 4096,
    "replicas.gateways": GATEWAYS,
    "replicas.min_gateways": GATEWAYS,
}
KILL, STOP, PARTITION = "kill", "stop", "partition"
NUM_FAULTS = {KILL: 200, STOP: 20, PARTITION: 20}
QUICK = {PARTITION: 1, KILL: 1}
MAX_PROBES = 5
LASTS_S = 6.0
"""Length of a stop and of a partition: both are noticed well before their end."""
BETWEEN_S = 0.3, 1.0
"""Bounds of the time between two faults."""
POLL_EVERY_S = 0.02
WITHIN_S = 120.0


@dataclass(slots=True)
class Load:
    """Clients that send streams without a break, and the engine that runs them."""

    address: ServerAddress
    engine: Any  # handle of a WatchedEngine
    requests: dict[int, Request] = field(default_factory=dict)  # by seed
    _seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _is_over: bool = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        clients = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._is_over = True
            await asyncio.gather(*clients)
            watch.cancel()
            self._is_over = False

    async def snapshot(self) -> Snapshot:
        """Return what the engine holds, and note the gateways of its streams."""
        snapshot: Snapshot = await self.engine.snapshot.remote()
        for port, seeds in snapshot.running.items():
            for seed in seeds.values():
                if seed in self.requests:
                    self.requests[seed].port = port
        return snapshot

    async def send(self) -> None:
        request = Request(next(self._seeds))
        self.requests[request.seed] = request
        body = {
            "model": "demo",
            "prompt": f"# {request.seed}\n{CODE_PROMPTS[request.seed % len(CODE_PROMPTS)]}",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "seed": request.seed,
        }
        try:
            async with asyncio.timeout(WITHIN_S):
                await self.address.post("/v1/completions", body, into=request.stream)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            request.connection_error = type(error).__name__
        request.over, stream = time.monotonic(), request.stream
        request.is_broken = not (
            stream.status == 200 and stream.num_finals == 1 and stream.ended is not None
        )

    async def _client(self) -> None:
        while not self._is_over:
            await self.send()

    async def _watch(self) -> None:
        while True:
            await self.snapshot()
            await asyncio.sleep(0.05)


def gateways() -> dict[int, int]:
    """Return the processes of the gateways that listen, by each port that they listen at."""
    return {
        connection.laddr.port: process.pid
        for process in own_processes_named(":Gateway")
        for connection in process.net_connections("tcp")
        if connection.status == "LISTEN"
    }


async def until(condition: Any) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not await condition():
            await asyncio.sleep(POLL_EVERY_S)


@dataclass(slots=True)
class Campaign:
    """Faults at random gateways of a server under load."""

    load: Load
    hub: RelayHub
    rng: random.Random

    async def strike(self, kind: str) -> Strike:
        """Strike a gateway that serves streams beside another one, and return when it is over."""
        snapshot, pids = await self._target()
        port = self.rng.choice(sorted(snapshot.running.keys() & pids.keys()))
        struck = snapshot.running[port].keys()
        at = time.monotonic()
        fault = asyncio.create_task(self._inject(kind, port, pids[port]))
        gone = 0.0

        async def has_gone() -> bool:
            nonlocal gone
            held = await self.load.snapshot()
            if kind == PARTITION:  # the gateway sends its requests again, as other sequences
                gone = time.monotonic() - at
                return not struck & held.sequences
            gone = held.ran_until[port] - at
            return port not in held.running

        await until(has_gone)
        await fault
        if kind != KILL:
            await self._until_streams_go_on(port)
        return Strike(at, port, len(struck), gone)

    async def _until_streams_go_on(self, port: int) -> None:
        """Wait for the streams of a gateway that lives: their pause belongs to this fault alone."""
        ended = time.monotonic()
        waiting = [one for one in self.load.requests.values() if one.port == port]

        async def go_on() -> bool:
            return all(
                one.over < math.inf or (one.stream.times and one.stream.times[-1] > ended)
                for one in waiting
            )

        await until(go_on)

    async def _target(self) -> tuple[Snapshot, dict[int, int]]:
        """Wait until two gateways serve streams."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                snapshot, pids = await self.load.snapshot(), await asyncio.to_thread(gateways)
                if len(snapshot.running.keys() & pids.keys()) >= 2:
                    return snapshot, pids
                await asyncio.sleep(0.5)

    async def _inject(self, kind: str, port: int, pid: int) -> None:
        """Do it, and return when the fault is over."""
        if kind == KILL:
            os.kill(pid, signal.SIGKILL)
        elif kind == STOP:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(LASTS_S)
            os.kill(pid, signal.SIGCONT)
        else:
            assert await self.hub.inject(str(port), "partition", LASTS_S)


def server_pids() -> set[int]:
    """Return the processes of engines and workers."""
    return {
        process.pid
        for name in (":WatchedEngine", "TargetWorker", "DraftWorker")
        for process in own_processes_named(name)
    }


async def idle(load: Load) -> Snapshot:
    """Return what the engine holds when it runs nothing, after a request or two."""

    async def is_idle() -> bool:
        held = await load.snapshot()
        return not held.running and not held.replies

    for _ in range(MAX_PROBES):
        await load.send()
        await until(is_idle)
        # The pages are as of the last round, which may have come before they were released.
        if not (await load.snapshot()).pages:
            break
    return await load.snapshot()


def held(snapshot: Snapshot) -> str:
    return (
        f"{snapshot.pages} pages, {snapshot.replies} replies, {snapshot.senders} links, "
        f"{snapshot.files} file handles"
    )


async def campaign(
    address: ServerAddress, engine: Any, num_faults: dict[str, int], *, seed: int, seconds: float
) -> AsyncIterator[tuple[str, Outcome]]:
    """Yield the outcome of each kind of fault; after `seconds` of it no more begin."""
    load, hub = Load(address, engine), RelayHub()
    try:
        campaign = Campaign(load, hub, random.Random(seed))
        for kind, number in num_faults.items():
            if kind == PARTITION:
                await engine.use_relays.remote(hub.port)
            before, pids, strikes = await idle(load), server_pids(), list[Strike]()
            load.requests.clear()
            async with load.running():
                until_s = time.monotonic() + seconds
                for count in range(number):
                    if time.monotonic() > until_s:
                        break
                    strikes.append(await campaign.strike(kind))
                    print(f"{kind} {count + 1}/{number}: {strikes[-1].gone:.2f} s", flush=True)
                    await asyncio.sleep(campaign.rng.uniform(*BETWEEN_S))
            outcome = Outcome.from_strikes(strikes, list(load.requests.values()))
            after = await idle(load)
            outcome.num_restarts = len(server_pids() - pids)
            outcome.num_leaked = max(0, after.pages - before.pages)
            failures = Counter(one.failure for one in load.requests.values() if one.is_broken)
            print(f"broken: {dict(failures)}")
            print(f"held before: {held(before)}; after: {held(after)}")
            yield kind, outcome
    finally:
        hub.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=NUM_FAULTS[KILL], metavar="N")
    parser.add_argument("--stops", type=int, default=NUM_FAULTS[STOP], metavar="N")
    parser.add_argument("--partitions", type=int, default=NUM_FAULTS[PARTITION], metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="of each kind, after which no more begin"
    )
    parser.add_argument("--outcomes", type=Path, metavar="FILE", help="keeps those of several runs")
    parser.add_argument("--quick", action="store_true", help="a fault or two of each kind")
    options = parser.parse_args()
    num_faults = (
        QUICK
        if options.quick
        else {KILL: options.kills, STOP: options.stops, PARTITION: options.partitions}
    )

    async def run(url: str, engine: Any) -> list[tuple[str, Outcome]]:
        wanted = {kind: number for kind, number in num_faults.items() if number}
        address = ServerAddress.from_url(url)
        outcomes = campaign(
            address, engine, wanted, seed=options.seed, seconds=60 * options.minutes
        )
        return [each async for each in outcomes]

    with served(KEYS, engine=WatchedEngine) as (url, config):
        outcomes = asyncio.run(run(url, handle(config, "Engine")))
    sums = added(options.outcomes, outcomes)
    print("\n".join((HEAD, *(outcome.row(kind) for kind, outcome in sums.items()))))
    return int(not all(outcome.is_harmless for outcome in sums.values()))


if __name__ == "__main__":
    sys.exit(main())
