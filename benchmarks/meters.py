"""Watches an engine's passes from outside: how long each took, on how many rows, and what the target made of the drafts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from specserve.llm import LLM
from specserve.models.huge import use_huge_pages


@dataclass(slots=True)
class Passes:
    """Seconds of each forward pass, by the number of rows whose logits were asked for."""

    seconds: dict[int, list[float]] = field(default_factory=dict)

    def typical(self, rows: int) -> float:
        return median(self.seconds[rows])

    @property
    def total(self) -> float:
        return sum(map(sum, self.seconds.values()))


@dataclass(slots=True)
class Meter:
    """Of one LLM, since `reset`."""

    target: Passes = field(default_factory=Passes)
    draft: Passes = field(default_factory=Passes)
    judged: list[tuple[int, int]] = field(
        default_factory=list
    )  # of each round with drafts: how many, and how many accepted

    def reset(self) -> None:
        self.target.seconds.clear()
        self.draft.seconds.clear()
        self.judged.clear()

    @property
    def alpha(self) -> float:
        """Acceptances among the draft tokens that were reached; those past a refusal were not."""
        reached = sum(min(accepted + 1, drafted) for drafted, accepted in self.judged)
        return sum(accepted for _, accepted in self.judged) / max(1, reached)


def metered(llm: LLM) -> Meter:
    """Puts a meter on an LLM in this process; it stays there."""
    meter = Meter()
    coordinator: Any = llm._coordinator
    _time_passes(coordinator.target._model.runner.network, meter.target)
    if coordinator.drafter is not None:
        _time_passes(coordinator.drafter._model.runner.network, meter.draft)
    _count_verdicts(coordinator.target._model, meter)
    return meter


def _time_passes(network: Any, passes: Passes) -> None:
    forward = network.logits

    def timed(ids: Any, layout: Any, wanted: Any) -> Any:
        start = time.perf_counter()
        logits = forward(ids, layout, wanted)
        passes.seconds.setdefault(len(logits), []).append(time.perf_counter() - start)
        return logits

    network.logits = timed


def _count_verdicts(model: Any, meter: Meter) -> None:
    verify = model.verify

    def counted(steps: Any) -> Any:
        verdicts = verify(steps)
        deciding = [step for step in steps if step.decide]
        meter.judged += [
            (len(step.drafts), v.accepted)
            for step, v in zip(deciding, verdicts, strict=True)
            if step.drafts
        ]
        return verdicts

    model.verify = counted


KINDS = {
    "mkldnn::_linear_pointwise": "linear layers",
    "aten::bmm": "attention's products",
    "aten::index_select": "gathering keys, values, rows",
    "aten::index_copy_": "writing keys and values",
}


def shares(run: Callable[[], object]) -> dict[str, float]:
    """Where the time of a run goes, as shares of its wall time; what no operation accounts for is Python's."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        run()
        wall = time.perf_counter() - start
    seconds: dict[str, float] = dict.fromkeys((*KINDS.values(), "other tensor operations"), 0.0)
    for event in profiler.key_averages():
        seconds[KINDS.get(event.key, "other tensor operations")] += event.self_cpu_time_total / 1e6
    seconds["Python between them"] = wall - sum(seconds.values())
    return {kind: spent / wall for kind, spent in seconds.items()}


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of plain decoding steps, and of reading as many bytes as the weights have, in turns: the machine drifts within seconds."""

    steps: list[float]
    reads: list[float]

    @property
    def ratio(self) -> float:
        return median(self.steps) / median(self.reads)


def against_floor(llm: LLM, run: Callable[[], object], *, num_bytes: int) -> Floor:
    """Each step of the run is preceded by a read, which pushes out of the caches no more than the step's own weights do."""
    coordinator: Any = llm._coordinator
    model, read, floor = coordinator.target._model, _reader(num_bytes), Floor([], [])
    verify, ended, reached = model.verify, 0.0, 0

    def after_a_read(steps: Any) -> Any:
        nonlocal ended, reached
        begun = time.perf_counter()
        start = steps[0].start if steps else 0
        if start > reached > 0:  # the text goes on, past its prompt
            floor.steps.append(begun - ended)
        reached = start
        read()
        ended = time.perf_counter()
        floor.reads.append(ended - begun)
        return verify(steps)

    model.verify = after_a_read
    run()
    model.verify = verify
    return floor


def _reader(num_bytes: int) -> Callable[[], object]:
    """Reads that many bytes, from huge pages like the weights that it is compared with."""
    buffer = torch.ones(num_bytes // 8, dtype=torch.int64)
    use_huge_pages(buffer.data_ptr(), buffer.nbytes)
    return buffer.sum
