"""Target and draft as Ray's workers, each on a core of its own, under a coordinator in this process: two devices, with nothing in front.

What the workers say of their own time is kept, so that a round can be taken apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from specserve.cluster.group import Group
from specserve.cluster.placement import bundles
from specserve.config.tree import Config
from specserve.engine import Coordinator
from specserve.engine.pacer import Pacer
from specserve.engine.trace import Exchange, Journal, Round
from specserve.errors import WorkerLost
from specserve.metrics import Registry
from specserve.types import Chunk, Request, Stats


@dataclass(slots=True)
class Run:
    """One closed loop: what was written, and what everyone did meanwhile."""

    begun: float
    ended: float = 0.0
    texts: dict[int, list[int]] = field(default_factory=dict)
    stats: dict[int, Stats] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts.values()))

    @property
    def rate(self) -> float:
        """Tokens a second, the reading of the prompts included."""
        return self.num_tokens / (self.ended - self.begun)

    @property
    def decoding(self) -> list[Round]:
        """The rounds that read no prompts, but for the first, whose drafts nobody could prepare."""
        return [done for done in self.rounds if not done.num_prompt_tokens][1:]

    def spans(self, role: str, name: str) -> list[float]:
        """Seconds of each span of that name while it decoded."""
        since, until = self.decoding[0].begun, self.decoding[-1].ended
        spans = [
            span
            for done in self.exchanges
            if done.role == role
            for span in done.spans
            if span.name == name
        ]
        return [span.ended - span.begun for span in spans if since <= span.begun < until]


class Rig:
    """One target and one drafter. Several rigs may be open; those that are not asked rest."""

    def __init__(self, config: Config, group: Group) -> None:
        self.config, self.group = config, group
        self.run = Run(0.0)
        self._auto = self._pacer(None)  # learns from one run to the next, as a server's does

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, config: Config, *, target_core: int, draft_core: int) -> AsyncIterator[Rig]:
        """Ray must be running."""
        before = _workers()
        rig: Rig

        def keep(done: Exchange) -> None:
            rig.run.exchanges.append(done)

        group = await Group.start(config, bundles(config, has_gpus=False), keep)
        rig = cls(config, group)
        for process in _workers() - before:
            _pin(
                process,
                target_core if "TargetWorker" in " ".join(process.cmdline()) else draft_core,
            )
        _pin(psutil.Process(), draft_core)
        try:
            yield rig
        finally:
            await group.close()

    async def complete(
        self,
        requests: Sequence[Request],
        *,
        gamma: int | None,
        concurrency: int | None = None,
        gamma_from: Mapping[int, int] | None = None,
    ) -> Run:
        """All requests, `concurrency` at a time; gamma None is the pacer's choice, and `gamma_from` changes it in certain rounds.

        Nothing is remembered of earlier runs but what pacer and anticipation have learnt.
        """
        self.run = run = Run(time.perf_counter())
        waiting = list(enumerate(requests))
        numbers: dict[int, int] = {}

        def submit() -> None:
            if waiting:
                number, request = waiting.pop(0)
                numbers[coordinator.submit(request)] = number

        def emit(chunks: Sequence[Chunk]) -> None:
            for chunk in chunks:
                _take(run, numbers[chunk.seq_id], chunk)
                if chunk.finish is not None:
                    submit()
            if len(run.stats) == len(requests):
                coordinator.close()

        def note(done: Round) -> None:
            run.rounds.append(done)
            if done.number in (gamma_from or {}):
                coordinator.pacer = self._pacer((gamma_from or {})[done.number])

        coordinator = self._coordinator(emit, note)
        coordinator.pacer = self._auto if gamma is None else self._pacer(gamma)
        for _ in range(min(concurrency or len(requests), len(requests))):
            submit()
        await coordinator.run()
        run.ended = time.perf_counter()
        return run

    def _pacer(self, gamma: int | None) -> Pacer:
        return Pacer(
            gamma, max_gamma=self.config.speculation.max_gamma, curve=self.group.info.curve
        )

    def _coordinator(
        self, emit: Callable[[Sequence[Chunk]], None], report: Callable[[Round], None]
    ) -> Coordinator:
        draft = self.group.draft_worker
        return Coordinator.of(
            self.config,
            self.group.target,
            self.group.drafter,
            info=self.group.info,
            emit=emit,
            draft_context=None if draft is None else draft.ready.context,
            report=report,
            overlaps=True,
        )


def trace_of(run: Run) -> dict[str, Any]:
    """As `GET /trace` would give it."""
    journal = Journal(Registry())
    for done in run.rounds:
        journal.record(done)
    for exchange in run.exchanges:
        journal.exchange(exchange)
    return journal.trace()


def _take(run: Run, number: int, chunk: Chunk) -> None:
    if chunk.error is not None:
        raise WorkerLost(chunk.error)
    run.texts.setdefault(number, []).extend(chunk.tokens)
    if chunk.finish is not None:
        assert chunk.stats is not None, "what has no error has stats"
        run.stats[number] = chunk.stats


def _workers() -> set[psutil.Process]:
    """The processes of ours that Ray runs on this machine."""
    return {
        process
        for process in psutil.process_iter(["cmdline"])
        if "Worker" in " ".join(process.info["cmdline"] or ())[:24]
    }


def _pin(process: psutil.Process, core: int) -> None:
    for thread in process.threads():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, {core})


def run(main: Any) -> Any:
    """Under uvloop, as Serve's replicas run."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
