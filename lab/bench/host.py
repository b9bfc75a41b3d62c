"""The host's work of a round, without a card: `python -m lab.bench.host`.

The real coordinator, scheduler, pacer, runner, drafter, sampling and text output run over networks
that compute nothing: a token's logits are a row of a table. So what is measured is what a card
would wait for, or what would have to be hidden beside it. Beside microseconds it counts calls of
Python functions, which no other work on the machine changes.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from specserve.cluster.engine.long_lived import freeze_objects
from specserve.config.tree import config_from_keys
from specserve.llm.inprocess import open_parts
from specserve.llm.local_engine import LocalEngine
from specserve.models.gpu.flashinfer_attention import UNDIVIDED
from specserve.models.layout import Layout
from specserve.models.planner import Planner
from specserve.models.runner import Runner
from specserve.sampling_params import Sampling
from specserve.types import Speculation

SEQUENCES, ROUNDS, QUICK_ROUNDS, WARM_ROUNDS = (1, 8, 32, 64, 256), 50, 3, 20
SETTINGS = ((0, 0.0), (0, 1.0), (3, 0.0), (3, 1.0))
"""Draft tokens a round, and temperature."""
PROMPT = 16
PEAK = 12.0
"""Logit of the likeliest token; the others have less than 1."""
AGREEMENT = 0.7
"""Share of the tokens after which draft and target expect the same one."""
INTRODUCTION = """Networks compute nothing, and nothing is planned for a card or launched there.
Microseconds of a round, whole and by stage; *propose* and *verify* are pages, layouts, sampling and
messages. On a card [plain rounds hide all of it](../design/models.md#two-forward-passes), and
rounds with drafts none. At T = 1 most of it are draws of the CPU, which a card makes itself."""
STAGES = ("_schedule", "_propose", "_verify", "_commit", "_emit_outbox")


class TableNetwork:
    """A network whose logits after a token are a row of a table; attention reads no page."""

    run_rows, sharded_head = UNDIVIDED, None

    def __init__(self, table: Tensor) -> None:
        self._table = table  # [vocab, vocab]

    def logits(self, ids: Tensor, layout: Layout, rows: Tensor | None) -> Tensor:
        return self._table.index_select(0, ids if rows is None else ids[rows])


def make_tables(vocab: int) -> tuple[Tensor, Tensor]:
    """Return the tables of target and draft."""
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(vocab, vocab, generator=generator)
    following = torch.randperm(vocab, generator=generator)
    differs = torch.rand(vocab, generator=generator) > AGREEMENT
    draft = target.clone()
    everyone = torch.arange(vocab)
    target[everyone, following] = PEAK
    draft[everyone, torch.where(differs, following.roll(1), following)] = PEAK
    return target, draft


def put_network(runner: Runner, table: Tensor) -> None:
    runner.network = TableNetwork(table)  # type: ignore[assignment]
    runner.planner = Planner(replace(runner.planner.geometry, run_rows=UNDIVIDED))


@dataclass(frozen=True, slots=True)
class HostRound:
    """Means of some rounds of one setting."""

    sequences: int
    gamma: int
    temperature: float
    seconds: float
    of_stages: dict[str, float]  # the rest is the engine's own loop
    num_calls: float  # of Python functions

    @property
    def row(self) -> str:
        parts = " | ".join(f"{self.of_stages[stage] * 1e6:,.0f}" for stage in STAGES)
        name = f"{self.sequences} | {self.gamma} | {self.temperature:g}"
        return f"| {name} | {self.seconds * 1e6:,.0f} | {parts} | {self.num_calls:,.0f} |"


def measure(sequences: int, gamma: int, temperature: float, rounds: int) -> HostRound:
    """Run rounds in which all sequences decode; the calls are counted in rounds of their own."""
    keys: dict[str, object] = {
        "speculation.gamma": gamma,
        "cache.pages": 64 + 40 * sequences,
        "limits.max_running": sequences,
        "weights.kernel": "onednn",
        **({} if gamma else {"draft.kind": "none"}),
    }
    config = config_from_keys(keys)
    parts = open_parts(config)
    target: Any = parts.target
    runner = target._model.runner
    tables = make_tables(parts.info.vocab_size)
    put_network(runner, tables[0])
    drafter: Any = parts.drafter
    for own in () if drafter is None else drafter._model._runners:
        put_network(own, tables[1])
    engine = LocalEngine(parts, config)
    sampling = Sampling(
        max_tokens=4096,
        temperature=temperature,
        seed=7,
        ignore_eos=True,
        speculation=Speculation(gamma=gamma),
    )
    waiting = deque(engine.continuations([5 + i] * PROMPT, sampling)[0] for i in range(sequences))
    while waiting:
        engine.step(waiting)
    for _ in range(WARM_ROUNDS):  # through all prompts
        engine.step(waiting)
    freeze_objects()  # as servers do
    seconds, of_stages = time_rounds(engine, rounds)
    num_calls = count_calls(engine, rounds)
    engine.close()
    return HostRound(sequences, gamma, temperature, seconds, of_stages, num_calls)


def time_rounds(engine: LocalEngine, rounds: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of a round, and of each of its stages."""
    coordinator: Any = engine.coordinator
    spent: Counter[str] = Counter()
    for stage in STAGES:
        method = getattr(coordinator, stage)
        is_awaited = stage in ("_propose", "_verify")
        setattr(coordinator, stage, (timed_call if is_awaited else timed)(method, stage, spent))
    started = time.perf_counter()
    for _ in range(rounds):
        engine.step(deque())
    seconds = (time.perf_counter() - started) / rounds
    for stage in STAGES:
        delattr(coordinator, stage)
    return seconds, {stage: spent[stage] / rounds for stage in STAGES}


def timed(method: Callable[..., Any], stage: str, spent: Counter[str]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*arguments)
        finally:
            spent[stage] += time.perf_counter() - started  # type: ignore[assignment]

    return call


def timed_call(
    method: Callable[..., Awaitable[Any]], stage: str, spent: Counter[str]
) -> Callable[..., Awaitable[Any]]:
    async def call(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return await method(*arguments)
        finally:
            spent[stage] += time.perf_counter() - started  # type: ignore[assignment]

    return call


def count_calls(engine: LocalEngine, rounds: int) -> float:
    """Return the calls of Python functions in a round."""
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        for _ in range(rounds):
            engine.step(deque())
    finally:
        sys.setprofile(None)
    return num_calls / rounds


def page(found: Sequence[HostRound], rounds: int, load: float) -> str:
    names = [stage.strip("_").removesuffix("_outbox") for stage in STAGES]
    machine = f"one thread, Python {platform.python_version()}, load before {load:.1f}"
    return "\n".join(
        [
            "# The host's work of a round",
            "",
            f"{date.today()}; `python -m lab.bench.host`, {rounds} rounds each, {machine}.",
            INTRODUCTION,
            "",
            "| sequences | gamma | T | round | " + " | ".join(names) + " | Python calls |",
            "|---|---|---|" + "---|" * (len(names) + 2),
            *(one.row for one in found),
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few sequences and rounds")
    parser.add_argument("--out", type=Path, help="write the page here, instead of printing it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    found = [
        measure(sequences, gamma, temperature, rounds)
        for gamma, temperature in SETTINGS
        for sequences in ((1, 2) if options.quick else SEQUENCES)
    ]
    text = page(found, rounds, load)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
