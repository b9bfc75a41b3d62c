"""Target and drafter as Ray workers on a core each, under a coordinator in this process.

Keeps the spans that the workers report, so that a round can be analysed. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from specserve.cluster.engine.group import WorkerGroup
from specserve.cluster.placement import bundles
from specserve.config.tree import Config, config_from_keys
from specserve.engine import Coordinator
from specserve.engine.pacer import Pacer
from specserve.engine.trace import Exchange, Round, TraceJournal
from specserve.errors import WorkerLost
from specserve.metrics import Registry
from specserve.types import Chunk, Request, Stats

T = TypeVar("T")

TARGET_CORE = 0
DRAFT_CORE = 1
Prompts = Sequence[tuple[int, ...]]


@dataclass(slots=True)
class LoopRun:
    """One closed loop: its output tokens, rounds and exchanges."""

    start: float
    end: float = 0.0
    output_ids: dict[int, list[int]] = field(default_factory=dict)  # by request
    stats: dict[int, Stats] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.output_ids.values()))

    @property
    def rate(self) -> float:
        """Output tokens per second, with the time of the prefill."""
        return self.num_tokens / (self.end - self.start)

    @property
    def decode_rounds(self) -> list[Round]:
        """Rounds without prefill, except the first, whose drafts could not be prepared."""
        return [round_ for round_ in self.rounds if not round_.num_prompt_tokens][1:]

    @property
    def hits(self) -> list[bool]:
        """True for each proposal that was ready when it was wanted, False for each other one."""
        return [
            outcome.anticipated
            for round_ in self.decode_rounds
            for outcome in round_.outcomes
            if outcome.anticipated is not None
        ]

    def span_seconds(self, role: str, name: str) -> list[float]:
        """Return the seconds of each span of that name during the decode rounds."""
        since, until = self.decode_rounds[0].start, self.decode_rounds[-1].end
        spans = [
            span
            for exchange in self.exchanges
            if exchange.role == role
            for span in exchange.spans
            if span.name == name
        ]
        return [span.end - span.start for span in spans if since <= span.start < until]


class Rig:
    """One target and one drafter. Several rigs may be open; those that are not called are idle."""

    def __init__(self, config: Config, group: WorkerGroup) -> None:
        self.config, self.group = config, group
        self.current_run = LoopRun(0.0)
        # It learns from one run to the next, as a server's does.
        self._auto_pacer = self._pacer(None)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, config: Config, cores: tuple[int, int] | None) -> AsyncIterator[Rig]:
        """Start the workers and pin target and draft to the cores; Ray must be running.

        The coordinator has the draft's core. With None they have all.
        """
        before = _worker_processes()
        rig: Rig

        def record_exchange(exchange: Exchange) -> None:
            rig.current_run.exchanges.append(exchange)

        group = await WorkerGroup.start(config, bundles(config, has_gpus=False), record_exchange)
        rig = cls(config, group)
        if cores is not None:
            for process in _worker_processes() - before:
                _pin(process, cores["TargetWorker" not in " ".join(process.cmdline())])
            _pin(psutil.Process(), cores[1])
        try:
            yield rig
        finally:
            await group.close()

    async def run_closed_loop(
        self,
        requests: Sequence[Request],
        *,
        gamma: int | None,
        concurrency: int | None = None,
        gamma_changes: Mapping[int, int] | None = None,
    ) -> LoopRun:
        """Complete all requests, `concurrency` at a time.

        Gamma None is the pacer's choice; `gamma_changes` sets it at certain rounds. Of earlier runs
        only the estimates of pacer and anticipation are kept.
        """
        self.current_run = run = LoopRun(time.perf_counter())
        waiting = list(enumerate(requests))
        numbers: dict[int, int] = {}

        def submit() -> None:
            if waiting:
                number, request = waiting.pop(0)
                numbers[coordinator.submit(request)] = number

        def emit(chunks: Sequence[Chunk]) -> None:
            for chunk in chunks:
                _record_chunk(run, numbers[chunk.seq_id], chunk)
                if chunk.finish is not None:
                    submit()
            if len(run.stats) == len(requests):
                coordinator.close()

        def record_round(round_: Round) -> None:
            run.rounds.append(round_)
            if round_.number in (gamma_changes or {}):
                coordinator.pacer = self._pacer((gamma_changes or {})[round_.number])

        coordinator = self._coordinator(emit, record_round)
        coordinator.pacer = self._auto_pacer if gamma is None else self._pacer(gamma)
        for _ in range(min(concurrency or len(requests), len(requests))):
            submit()
        await coordinator.run()
        run.end = time.perf_counter()
        return run

    def _pacer(self, gamma: int | None) -> Pacer:
        return Pacer(
            gamma, max_gamma=self.config.speculation.max_gamma, curve=self.group.info.curve
        )

    def _coordinator(
        self, emit: Callable[[Sequence[Chunk]], None], report: Callable[[Round], None]
    ) -> Coordinator:
        return Coordinator(
            self.group.target,
            self.group.drafter,
            info=self.group.info,
            limits=self.config.limits,
            speculation=self.config.speculation,
            emit=emit,
            draft_context=self.group.draft_context,
            report=report,
            remote_workers=True,
            drafts_prompts=self.group.drafts_prompts,
        )


@dataclass(frozen=True, slots=True)
class RigPair:
    """The same target twice: with a drafter that anticipates, and with one in lockstep."""

    anticipating: Rig
    lockstep: Rig
    prompts: Prompts


@contextlib.asynccontextmanager
async def open_rigs(target: Path, draft: Path, prompts: Prompts) -> AsyncIterator[RigPair]:
    """Open both rigs on the same two cores."""
    cores = TARGET_CORE, DRAFT_CORE
    apart: dict[str, object] = {"target.threads": 1, "draft.threads": 1, "draft.placement": "apart"}
    lockstep = {"speculation.anticipation.enabled": False}
    async with (
        Rig.open(_rig_config(target, draft, apart), cores) as anticipating,
        Rig.open(_rig_config(target, draft, apart | lockstep), cores) as in_lockstep,
    ):
        yield RigPair(anticipating, in_lockstep, prompts)


@contextlib.asynccontextmanager
async def open_together(target: Path, draft: Path) -> AsyncIterator[Rig]:
    """Open a rig whose draft is in the target's process, on all cores."""
    config = _rig_config(target, draft, {"draft.placement": "together"})
    async with Rig.open(config, None) as rig:
        yield rig


def _rig_config(target: Path, draft: Path, more: Mapping[str, object]) -> Config:
    return config_from_keys(
        {
            "target.path": str(target),
            "draft.path": str(draft),
            "cache": {"pages": 2048, "prefix_caching": False},
            **more,
        }
    )


def trace_of(run: LoopRun) -> dict[str, Any]:
    """Return the trace of a run, as `GET /trace` returns it."""
    journal = TraceJournal(Registry())
    for round_ in run.rounds:
        journal.record_round(round_)
    for exchange in run.exchanges:
        journal.record_exchange(exchange)
    return journal.trace()


def _record_chunk(run: LoopRun, number: int, chunk: Chunk) -> None:
    if chunk.error is not None:
        raise WorkerLost(chunk.error)
    run.output_ids.setdefault(number, []).extend(chunk.tokens)
    if chunk.finish is not None:
        assert chunk.stats is not None, "a request without an error has stats"
        run.stats[number] = chunk.stats


def _worker_processes() -> set[psutil.Process]:
    """Return the worker processes that Ray runs on this machine."""
    return {
        process
        for process in psutil.process_iter(["cmdline"])
        if "Worker" in " ".join(process.info["cmdline"] or ())[:24]
    }


def _pin(process: psutil.Process, core: int) -> None:
    for thread in process.threads():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, {core})


def run_with_uvloop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine under uvloop, as Ray Serve runs its replicas."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
