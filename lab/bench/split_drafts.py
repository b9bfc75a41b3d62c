"""One engine on several devices of a draft pool: `python -m lab.bench.split_drafts`.

A real coordinator, links and pool workers, each of these in a process of its own. Devices are
declared, as in `lab.bench.pools`; a draft keeps the pages of prompts that it has read. The
prompts begin with one of a few prefixes. Sequences go where their prefix is cached, or, beside
that, to the shorter queue whatever is cached.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median

from lab.bench.pools import (
    CONTEXT,
    HOST,
    INFO,
    PAGE_SIZE,
    PAGES,
    VERIFY_S,
    DeclaredEngine,
    JoinPool,
    SleepingClock,
    started,
)
from lab.simulate.acceptance_model import AcceptanceConfig, AcceptanceModel
from lab.simulate.draft_model import SimulatedDraftModel
from lab.simulate.pass_times import LinearPassTime
from lab.simulate.pool import EngineTexts
from specserve.cluster.engine.long_lived import freeze_objects
from specserve.cluster.engine.remote import RemoteDrafter
from specserve.cluster.gateway.prefix_affinity import EngineState, PrefixAffinity
from specserve.cluster.transport.endpoint import KeyPair
from specserve.cluster.transport.link import Client
from specserve.drafters.branches import Fanout
from specserve.drafters.registry import OpenDrafter
from specserve.features.draft_pools.split import SplitDrafter
from specserve.features.draft_pools.worker import PoolWorker
from specserve.tools.bench.report import machine
from specserve.types import DraftStep, Proposal, Request, Warp

DRAFTS = (
    LinearPassTime(fixed=0.001, per_row=0.0001),
    LinearPassTime(fixed=0.002, per_row=0.0002),
)


class QueuesAlone(PrefixAffinity):
    """A choice that knows no prompts, and so not what a second copy of one costs."""

    def record(self, name: str, tokens: Sequence[int], salt: bytes, engine: EngineState) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ChatLoad:
    """Closed loop of requests whose prompts begin with one of a few prefixes."""

    streams: int
    requests: int
    tokens: int
    prefixes: int
    prefix_tokens: int

    @property
    def asked(self) -> Iterator[Request]:
        for number in range(self.requests):
            first = number * 7 % self.prefixes * self.prefix_tokens
            prompt = (*range(first, first + self.prefix_tokens), *[10**5 + number] * PAGE_SIZE)
            yield Request(prompt, self.tokens, Warp(temperature=0.0), seed=0, ignore_eos=True)


FULL = ChatLoad(streams=16, requests=96, tokens=96, prefixes=8, prefix_tokens=512)
QUICK = ChatLoad(streams=2, requests=4, tokens=8, prefixes=2, prefix_tokens=64)


@dataclass(frozen=True, slots=True)
class SplitWay:
    """A number of devices, and what decides on which of them a sequence is drafted."""

    name: str
    devices: int
    choice: type[PrefixAffinity] = PrefixAffinity


WAYS = (
    SplitWay("one device", 1),
    SplitWay("two, by queues alone", 2, QueuesAlone),
    SplitWay("two, by cache and queue", 2),
)


@dataclass(frozen=True, slots=True)
class SplitTurn:
    """Result of one run."""

    tokens_per_s: float
    read: int  # tokens of prompts that drafts have computed
    accepted: float  # draft tokens of a proposal
    draft_ms: float  # until a round had its proposals


class ReadingTime:
    """The time of passes, which takes no rows for what is cached of prompts."""

    def __init__(self, draft: LinearPassTime) -> None:
        self._draft = draft
        self.num_cached = 0  # tokens of the next pass

    def seconds(self, rows: int, sequences: int, positions: int) -> float:
        rows, self.num_cached = rows - self.num_cached, 0
        return self._draft.seconds(rows, sequences, positions)


class PrefixReader(SimulatedDraftModel):
    """A draft that computes no page of a prompt twice."""

    def __init__(self, texts: EngineTexts, draft: LinearPassTime) -> None:
        self._reading_time, self._cached = ReadingTime(draft), set[tuple[int, ...]]()
        self._prompts: dict[int, tuple[int, ...]] = {}
        self.num_read = 0  # tokens of prompts
        super().__init__(
            texts, self._reading_time, SleepingClock(), pages=PAGES, page_size=PAGE_SIZE
        )

    def draft(
        self, steps: Sequence[DraftStep], should_stop: Callable[[], bool]
    ) -> Sequence[Proposal]:
        for step in steps:
            if not step.start or not step.gamma:
                self._read(step)
        return super().draft(steps, should_stop)

    def _read(self, step: DraftStep) -> None:
        """Note the pages of a piece of a prompt, and take no time for those that are cached."""
        before = self._prompts.get(step.seq_id, ())[: step.start]
        text = self._prompts[step.seq_id] = (*before, *step.tokens)
        pages = {text[:stop] for stop in range(PAGE_SIZE, len(text), PAGE_SIZE)}
        pages = {page for page in pages if len(page) - PAGE_SIZE >= step.start}
        num_cached = PAGE_SIZE * len(pages & self._cached)
        self._reading_time.num_cached += num_cached
        self.num_read += len(step.tokens) - num_cached
        self._cached |= pages


class DeclaredDraft(OpenDrafter):
    """The drafter of a declared device, which anticipates."""

    def __init__(self, model: PrefixReader) -> None:
        super().__init__(model, context=CONTEXT, fanout=Fanout())

    @property
    def num_pages(self) -> int:
        return PAGES


def serve_device(pipe: Connection, draft: LinearPassTime) -> None:
    """Draft for one engine until there is a message; answer with the tokens of prompts read."""
    texts = EngineTexts()
    model = PrefixReader(texts, draft)
    worker = PoolWorker(lambda info: DeclaredDraft(model), HOST, page_size=PAGE_SIZE, max_places=64)
    freeze_objects()
    thread = threading.Thread(target=worker.run)
    thread.start()
    asked: JoinPool = pipe.recv()
    number = worker.join(asked.public_key, INFO)
    texts.models[number] = AcceptanceModel(asked.seed, AcceptanceConfig())
    pipe.send(worker.address)
    pipe.recv()
    pipe.send(model.num_read)
    worker.stop()
    thread.join()


def linked(pipe: Connection, stack: ExitStack) -> RemoteDrafter:
    """Return a drafter that is linked to a device."""
    keys = KeyPair.generate()
    pipe.send(JoinPool(keys.public, seed=0))
    client, drafter = Client(keys, pipe.recv()), RemoteDrafter(deadline_s=30.0)
    stack.callback(client.close)
    drafter.attach([client])
    return drafter


def run(load: ChatLoad, way: SplitWay, draft: LinearPassTime) -> SplitTurn:
    """Complete all requests of a load by one engine."""
    with ExitStack() as stack:
        pipes = [started(serve_device, stack, draft) for _ in range(way.devices)]
        drafters = [linked(pipe, stack) for pipe in pipes]
        split = SplitDrafter(drafters, way.choice()) if way.devices > 1 else None
        engine = DeclaredEngine(split or drafters[0], streams=load.streams)
        for request in load.asked:
            seq_id = engine.coordinator.submit(request)
            if split is not None:
                split.expect(seq_id, request)
        seconds = asyncio.run(engine.complete())
        for pipe in pipes:
            pipe.send("read")
        return SplitTurn(
            engine.num_tokens / seconds,
            sum(pipe.recv() for pipe in pipes),
            mean(outcome.accepted for outcome in engine.outcomes),
            engine.draft_ms,
        )


Found = Mapping[LinearPassTime, Mapping[SplitWay, Sequence[SplitTurn]]]


def report(found: Found, load: ChatLoad, turns: int) -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# An engine on several devices of a pool\n"
    yield "`python -m lab.bench.split_drafts`\n"
    yield f"{date.today()}, {machine()}. One engine, on declared devices: a pass of the target"
    yield f"takes {1e3 * VERIFY_S:g} ms, one of a draft what the table says, asleep."
    yield f"{load.streams} streams, {load.requests} requests of {load.tokens} tokens, whose prompts"
    yield f"begin with one of {load.prefixes} prefixes of {load.prefix_tokens} tokens; {turns}"
    yield "turns (A B C A B C), medians.\n"
    yield (
        "| draft pass, ms | drafts | tokens/s | to one device | tokens of prompts read | accepted "
        "| wait, ms |"
    )
    yield "|---|---|---|---|---|---|---|"
    for draft, ways in found.items():
        for way, all_turns in ways.items():
            ratios = [
                one.tokens_per_s / other.tokens_per_s
                for one, other in zip(all_turns, ways[WAYS[0]], strict=True)
            ]
            cells = [
                f"{1e3 * draft.fixed:g} and {1e3 * draft.per_row:g} a row",
                way.name,
                f"{median(one.tokens_per_s for one in all_turns):.0f}",
                f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{median(one.read for one in all_turns):,.0f}",
                f"{median(one.accepted for one in all_turns):.2f}",
                f"{median(one.draft_ms for one in all_turns):.1f}",
            ]
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    load, turns = (QUICK, 1) if options.quick else (FULL, options.turns)
    found: dict[LinearPassTime, dict[SplitWay, list[SplitTurn]]] = {}
    for draft in DRAFTS[:1] if options.quick else DRAFTS:
        found[draft] = {way: [] for way in WAYS}
        for _ in range(turns):
            for way in WAYS:
                found[draft][way].append(run(load, way, draft))
    text = "\n".join(report(found, load, turns)) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
