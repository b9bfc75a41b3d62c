"""One draft for several engines beside drafts of their own: `python -m lab.bench.pools`.

Real coordinators, links and pool workers, each in a process of its own. Devices are declared: a
pass sleeps for as long as it is said to take, so that devices which this machine lacks do not share
its cores. Texts and accepted tokens are simulated as by `python -m lab.simulate`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median

from lab.simulate.acceptance_model import VOCAB, AcceptanceConfig, AcceptanceModel
from lab.simulate.clock import DeviceClock
from lab.simulate.devices import HostConfig, SimulatedTarget
from lab.simulate.draft_model import SimulatedDraftModel
from lab.simulate.pass_times import LinearPassTime, PassTime
from lab.simulate.pool import EngineTexts
from specserve.cluster.engine.long_lived import freeze_objects
from specserve.cluster.engine.remote import RemoteDrafter
from specserve.cluster.transport.endpoint import Address, KeyPair
from specserve.cluster.transport.link import Client
from specserve.config.tree import config_from_keys
from specserve.drafters.branches import Fanout
from specserve.drafters.registry import OpenDrafter
from specserve.engine import Coordinator
from specserve.engine.batch import Outcome
from specserve.engine.trace import Round
from specserve.features.draft_pools.worker import PoolWorker
from specserve.tools.bench.report import machine
from specserve.types import Chunk, Drafter, ModelInfo, Request, Warp

VERIFY_S = 0.030
PAGES, PAGE_SIZE, CONTEXT = 10**6, 16, 4096
INFO = ModelInfo(
    VOCAB,
    CONTEXT,
    frozenset(),
    PAGE_SIZE,
    PAGES,
    tuple((rows, VERIFY_S) for rows in (1, 4, 16, 64)),
)
"""The target of an engine on declared devices."""
MAX_BUSY = 0.7
"""Share of its time that a pool may draft at the loads where it is to lose little."""
GOAL = 0.95
HOST = "127.0.0.1"
IMPORTED_ONCE = (
    "specserve.features.draft_pools.worker",
    "specserve.drafters.registry",
    "specserve.engine",
    "lab.simulate.pool",
)


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Closed loops of requests: their streams and requests for each engine."""

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
        super().__init__(model, context=CONTEXT, fanout=Fanout())

    @property
    def num_pages(self) -> int:
        return PAGES


@dataclass(frozen=True, slots=True)
class JoinPool:
    """Asks a draft's process to take an engine whose texts have this seed."""

    public_key: bytes
    seed: int


class DraftProcess:
    """A draft device with its worker, in a process of its own."""

    def __init__(self, draft_s: float, stack: ExitStack) -> None:
        self._pipe = started(serve_draft, stack, draft_s)
        stack.callback(self._pipe.send, None)

    def join(self, request: JoinPool) -> Address:
        self._pipe.send(request)
        address: Address = self._pipe.recv()
        return address

    def busy_seconds(self) -> float:
        """Return the time in which it drafted what was requested."""
        self._pipe.send("busy")
        return float(self._pipe.recv())


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Tokens a second of an engine's requests, and what its rounds had of the draft."""

    tokens_per_s: float
    hits: float  # share of the proposals that were ready when they were requested
    accepted: float  # draft tokens of a proposal
    draft_ms: float  # until a round had its proposals


class EngineProcess:
    """A coordinator over a declared target, in a process of its own."""

    def __init__(self, draft: DraftProcess, seed: int, load: PoolLoad, stack: ExitStack) -> None:
        self._pipe = started(run_engine, stack, seed, load)
        self._pipe.send(draft.join(self._pipe.recv()))
        assert self._pipe.recv() == "linked"

    def begin(self) -> None:
        self._pipe.send("go")

    def speed(self) -> EngineSpeed:
        """Return the speed once all requests are done."""
        speed: EngineSpeed = self._pipe.recv()
        return speed


def started(main: Callable[..., None], stack: ExitStack, *arguments: object) -> Connection:
    """Start a process that runs `main(pipe, *arguments)`, and return the other end of its pipe."""
    forks = multiprocessing.get_context("forkserver")  # which imports once for all
    forks.set_forkserver_preload(list(IMPORTED_ONCE))
    pipe, theirs = multiprocessing.Pipe()
    process = forks.Process(target=main, args=(theirs, *arguments))
    process.start()
    theirs.close()
    stack.callback(process.join)
    return pipe


def serve_draft(pipe: Connection, draft_s: float) -> None:
    texts = EngineTexts()
    worker = PoolWorker(
        lambda info: DeclaredDrafter(texts, LinearPassTime(fixed=draft_s)),
        HOST,
        page_size=PAGE_SIZE,
        max_places=64,
    )
    freeze_objects()
    thread = threading.Thread(target=worker.run)
    thread.start()
    while (asked := pipe.recv()) is not None:
        if isinstance(asked, JoinPool):
            number = worker.join(asked.public_key, INFO)
            texts.models[number] = AcceptanceModel(asked.seed, AcceptanceConfig())
            pipe.send(worker.address)
        else:
            pipe.send(worker.busy_seconds["draft"])
    worker.stop()
    thread.join()


class DeclaredEngine:
    """A real coordinator whose target sleeps, and what it has written."""

    def __init__(self, drafter: Drafter, *, streams: int, seed: int = 0) -> None:
        config = config_from_keys({"limits.max_running": streams})
        self.num_tokens = 0
        self.rounds: list[Round] = []
        self.coordinator = Coordinator(
            SimulatedTarget(
                AcceptanceModel(seed, AcceptanceConfig()),
                LinearPassTime(fixed=VERIFY_S),
                link_s=0.0,
                host=HostConfig(),
            ),
            drafter,
            info=INFO,
            limits=config.limits,
            speculation=config.speculation,
            emit=self._count,
            report=self.rounds.append,
            remote_workers=True,
        )

    async def complete(self) -> float:
        """Complete what was submitted, and return the seconds."""
        begun = time.perf_counter()
        while self.coordinator.has_work:
            await self.coordinator.round()
        return time.perf_counter() - begun

    @property
    def outcomes(self) -> Sequence[Outcome]:
        return [outcome for one in self.rounds for outcome in one.outcomes]

    @property
    def draft_ms(self) -> float:
        """How long rounds waited for their proposals."""
        return 1e3 * mean(one.drafted_at - one.start for one in self.rounds if one.outcomes)

    def _count(self, chunks: Sequence[Chunk]) -> None:
        self.num_tokens += sum(len(chunk.tokens) for chunk in chunks)


def run_engine(pipe: Connection, seed: int, load: PoolLoad) -> None:
    keys = KeyPair.generate()
    pipe.send(JoinPool(keys.public, seed))
    client, drafter = Client(keys, pipe.recv()), RemoteDrafter(deadline_s=30.0)
    drafter.attach([client])
    engine = DeclaredEngine(drafter, streams=load.streams, seed=seed)
    for _ in range(load.requests):
        engine.coordinator.submit(
            Request((0,) * 16, load.tokens, Warp(temperature=0.0), seed=0, ignore_eos=True)
        )
    freeze_objects()
    pipe.send("linked")
    assert pipe.recv() == "go"
    seconds = asyncio.run(engine.complete())
    assert engine.num_tokens == load.requests * load.tokens
    pipe.send(
        EngineSpeed(
            engine.num_tokens / seconds,
            mean(outcome.anticipated is True for outcome in engine.outcomes),
            mean(outcome.accepted for outcome in engine.outcomes),
            engine.draft_ms,
        )
    )
    client.close()


@dataclass(frozen=True, slots=True)
class Way:
    """A way to draft for engines: a number of engines, and drafts that they share."""

    name: str
    engines: int
    drafts: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Means over the engines of one run, and how busy a draft was with what was requested."""

    speed: EngineSpeed
    busy: float


@dataclass(slots=True)
class PoolComparison:
    """The turns of each way with a draft pass of `draft_ms` milliseconds."""

    draft_ms: float
    turns: dict[Way, list[Turn]]

    def rows(self) -> Iterator[str]:
        """Yield a row for each way; the last shares one draft, and the one before does not."""
        *_, own, pool = self.turns
        for way, turns in self.turns.items():
            speeds = [turn.speed for turn in turns]
            cells = [
                f"{self.draft_ms:g}",
                way.name,
                f"{median(speed.tokens_per_s for speed in speeds):.0f}",
                self._ratio(own, pool) if way is pool else "",
                f"{median(speed.hits for speed in speeds):.2f}",
                f"{median(speed.accepted for speed in speeds):.2f}",
                f"{median(speed.draft_ms for speed in speeds):.1f}",
                f"{median(turn.busy for turn in turns):.0%}",
            ]
            yield f"| {' | '.join(cells)} |"

    def _ratio(self, own: Way, pool: Way) -> str:
        ratios = [
            shared.speed.tokens_per_s / alone.speed.tokens_per_s
            for shared, alone in zip(self.turns[pool], self.turns[own], strict=True)
        ]
        busy = median(turn.busy for turn in self.turns[pool])
        verdict = "" if busy < MAX_BUSY else ", too busy"
        return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}){verdict}"


def measure(load: PoolLoad, *, engines: int, draft_ms: float, turns: int) -> PoolComparison:
    """Measure an engine alone, all with drafts of their own, and all with one, in turns."""
    ways = (
        Way("an engine alone", 1, 1),
        Way(f"{engines} engines, a draft each", engines, engines),
        Way(f"{engines} engines, one draft", engines, 1),
    )
    found = PoolComparison(draft_ms, {way: [] for way in ways})
    for _ in range(turns):
        for way in ways:
            found.turns[way].append(_run(load, way, draft_ms / 1e3))
    return found


def _run(load: PoolLoad, way: Way, draft_s: float) -> Turn:
    with ExitStack() as stack:
        drafts = [DraftProcess(draft_s, stack) for _ in range(way.drafts)]
        engines = [
            EngineProcess(drafts[seed % way.drafts], seed, load, stack)
            for seed in range(way.engines)
        ]
        begun = time.perf_counter()
        for engine in engines:
            engine.begin()
        speeds = [engine.speed() for engine in engines]
        seconds = time.perf_counter() - begun
        means = EngineSpeed(
            *(mean(getattr(one, name.name) for one in speeds) for name in fields(EngineSpeed))
        )
        return Turn(means, mean(draft.busy_seconds() for draft in drafts) / seconds)


def report(found: Sequence[PoolComparison], load: PoolLoad, *, turns: int) -> str:
    return "\n".join(
        [
            "# Draft pools",
            "",
            "`python -m lab.bench.pools`",
            "",
            f"{date.today()}, {machine()}. Real coordinators, links and pool workers, each in a "
            f"process, on declared devices: a pass of a target takes {1e3 * VERIFY_S:g} ms and one "
            f"of a draft what the table says, asleep. {load.streams} streams an engine, "
            f"{load.requests} requests of {load.tokens} tokens each; the pacer chooses gamma. "
            f"{turns} turns of each way one after the other (A B C A B C), medians.",
            "",
            "| draft pass, ms | way | tokens/s an engine | ratio | hits | accepted | "
            "draft wait, ms | draft busy |",
            "|---|---|---|---|---|---|---|---|",
            *(row for one in found for row in one.rows()),
            "",
            "*Ratio* is that of one draft to a draft each, with the least and the most of the "
            f"turns. The goal is at least {GOAL:g} where the draft is busy for less than "
            f"{MAX_BUSY:.0%} of its time with what was asked for; what it prepares in the time "
            "that is left does not count. *Hits* is the share of proposals that were ready, "
            "*accepted* the draft tokens of a proposal, *draft wait* the time until a round had "
            "its proposals.",
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
