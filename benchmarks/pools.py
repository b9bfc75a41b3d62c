"""One draft for several engines beside a draft of its own: `python -m benchmarks.pools`.

Real coordinators, links and pool workers, in one process. Devices are declared: a pass sleeps for
as long as it is said to take, so that devices which this machine lacks do not share its cores. An
engine with its own draft runs alone: several drafts would share the interpreter, as none does.
Texts and accepted tokens are those of `specserve simulate`.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import mean, median

from specserve.cluster.pool_worker import PoolWorker
from specserve.cluster.remote import RemoteDrafter
from specserve.cluster.transport.endpoint import KeyPair
from specserve.cluster.transport.link import Client
from specserve.config.tree import config_from_keys
from specserve.drafters.branches import Fanout
from specserve.drafters.pool.shares import engine_of
from specserve.drafters.registry import OpenDrafter
from specserve.engine import Coordinator
from specserve.tools.bench.report import machine
from specserve.tools.simulate.acceptance_model import VOCAB, AcceptanceConfig, AcceptanceModel
from specserve.tools.simulate.clock import DeviceClock
from specserve.tools.simulate.devices import HostConfig, SimulatedTarget
from specserve.tools.simulate.draft_model import SimulatedDraftModel
from specserve.tools.simulate.pass_times import LinearPassTime, PassTime
from specserve.tools.simulate.pool import EngineTexts
from specserve.types import Chunk, ModelInfo, Request, Warp

VERIFY_S = 0.030
PAGES, PAGE_SIZE, CONTEXT = 10**6, 16, 4096
MAX_BUSY = 0.7
"""Share of its time that a pool may draft at the loads where it is to lose little."""
GOAL = 0.95
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Closed loops of requests: so many streams and requests for each engine."""

    engines: tuple[int, ...]
    draft_ms: tuple[float, ...]
    streams: int
    requests: int
    tokens: int


FULL = PoolLoad((2, 4), (0.2, 0.5, 1.0, 2.0), streams=4, requests=12, tokens=160)
QUICK = PoolLoad((2,), (0.5,), streams=2, requests=2, tokens=24)


class SleepingClock(DeviceClock):
    """The clock of a device whose passes take real time."""

    def __call__(self) -> float:
        return time.perf_counter()

    def work(self, seconds: float) -> None:
        time.sleep(seconds)
        self.busy += seconds


class DeclaredDrafter(OpenDrafter):
    """A drafter with anticipation on a declared device."""

    def __init__(self, texts: EngineTexts, pass_time: PassTime) -> None:
        model = SimulatedDraftModel(
            texts, pass_time, SleepingClock(), pages=PAGES, page_size=PAGE_SIZE
        )
        super().__init__(model, context=CONTEXT, fanout=Fanout(), group_of=engine_of)

    @property
    def num_pages(self) -> int:
        return PAGES


class DraftDevice:
    """A draft device with its worker, in a thread of its own."""

    def __init__(self, draft_s: float, stack: ExitStack) -> None:
        self._texts = EngineTexts()
        self.worker = PoolWorker(
            lambda info: DeclaredDrafter(self._texts, LinearPassTime(fixed=draft_s)),
            HOST,
            page_size=PAGE_SIZE,
            max_places=64,
        )
        thread = threading.Thread(target=self.worker.run)
        thread.start()
        stack.callback(thread.join)
        stack.callback(self.worker.stop)

    def join(self, info: ModelInfo, seed: int) -> Client:
        """Link an engine whose texts have this seed."""
        keys = KeyPair.generate()
        number = self.worker.join(keys.public, info)
        self._texts.models[number] = AcceptanceModel(seed, AcceptanceConfig())
        return Client(keys, self.worker.address)


class DeclaredEngine:
    """A coordinator over a declared target, with a closed loop of requests."""

    def __init__(self, pool: DraftDevice, seed: int, load: PoolLoad) -> None:
        pass_time = LinearPassTime(fixed=VERIFY_S)
        curve = tuple((rows, VERIFY_S) for rows in (1, 4, 16, 64))
        info = ModelInfo(VOCAB, CONTEXT, frozenset(), PAGE_SIZE, PAGES, curve)
        config = config_from_keys({"limits.max_running": load.streams})
        drafter = RemoteDrafter(deadline_s=30.0)
        self._client = pool.join(info, seed)
        drafter.attach([self._client])
        target = SimulatedTarget(
            AcceptanceModel(seed, AcceptanceConfig()), pass_time, link_s=0.0, host=HostConfig()
        )
        self._coordinator = Coordinator(
            target,
            drafter,
            info=info,
            limits=config.limits,
            speculation=config.speculation,
            emit=self._count,
            remote_workers=True,
        )
        self._load, self._num_tokens = load, 0

    async def run(self) -> float:
        """Return the tokens a second of all requests."""
        begun = time.perf_counter()
        for _ in range(self._load.requests):
            request = Request(
                (0,) * 16, self._load.tokens, Warp(temperature=0.0), seed=0, ignore_eos=True
            )
            self._coordinator.submit(request)
        while self._coordinator.has_work:
            await self._coordinator.round()
        seconds = time.perf_counter() - begun
        self._client.close()
        assert self._num_tokens == self._load.requests * self._load.tokens
        return self._num_tokens / seconds

    def _count(self, chunks: Sequence[Chunk]) -> None:
        self._num_tokens += sum(len(chunk.tokens) for chunk in chunks)


@dataclass(slots=True)
class PoolComparison:
    """Tokens a second of an engine in both ways, by turn, and how busy the shared draft was."""

    engines: int
    draft_ms: float
    own: list[float] = field(default_factory=list)
    pool: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [shared / own for shared, own in zip(self.pool, self.own, strict=True)]

    def row(self) -> str:
        ratios = self.ratios
        counts = median(self.busy) < MAX_BUSY
        verdict = ("yes" if median(ratios) >= GOAL else "no") if counts else "too busy"
        return (
            f"| {self.engines} | {self.draft_ms:g} | {median(self.own):.0f} | "
            f"{median(self.pool):.0f} | {median(ratios):.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f}) | {median(self.busy):.0%} | {verdict} |"
        )


def measure(load: PoolLoad, *, engines: int, draft_ms: float, turns: int) -> PoolComparison:
    """Measure both ways in turns."""
    found = PoolComparison(engines, draft_ms)
    for _ in range(turns):
        rate, _ = _run(load, 1, draft_ms / 1e3)
        found.own.append(rate)
        rate, busy = _run(load, engines, draft_ms / 1e3)
        found.pool.append(rate)
        found.busy.append(busy)
    return found


def _run(load: PoolLoad, engines: int, draft_s: float) -> tuple[float, float]:
    """Return the tokens a second of an engine, and the share of time that a draft worked for it."""
    with ExitStack() as stack:
        device = DraftDevice(draft_s, stack)

        async def run_all() -> list[float]:
            made = [DeclaredEngine(device, seed, load) for seed in range(engines)]
            return list(await asyncio.gather(*(engine.run() for engine in made)))

        begun = time.perf_counter()
        rates = asyncio.run(run_all())
        seconds = time.perf_counter() - begun
        return mean(rates), device.worker.busy_seconds["draft"] / seconds


def report(found: Sequence[PoolComparison], load: PoolLoad, *, turns: int) -> str:
    return "\n".join(
        [
            "# Draft pools",
            "",
            "`make bench-pool`",
            "",
            f"{date.today()}, {machine()}. Real coordinators, links and pool workers in one "
            f"process, on declared devices: a pass of a target takes {1e3 * VERIFY_S:g} ms and one "
            f"of a draft what the table says, asleep. {load.streams} streams an engine, "
            f"{load.requests} requests of {load.tokens} tokens each; the pacer chooses gamma. "
            f"{turns} turns of one engine with its own draft and of one draft for all (A B A B), "
            "medians with the least and the most.",
            "",
            "| engines | draft pass, ms | tokens/s an engine, its own draft | one for all | "
            f"ratio | shared draft busy | at least {GOAL:g} |",
            "|---|---|---|---|---|---|---|",
            *(one.row() for one in found),
            "",
            "*Busy* is the share of time in which the shared draft drafts what was asked for; the "
            f"goal is of loads where that is below {MAX_BUSY:.0%}. What is prepared in the time "
            "that is left does not count.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    load, turns = (QUICK, 1) if args.quick else (FULL, args.turns)
    found = [
        measure(load, engines=engines, draft_ms=draft_ms, turns=turns)
        for engines in load.engines
        for draft_ms in load.draft_ms
    ]
    text = report(found, load, turns=turns)
    print(text, flush=True)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
