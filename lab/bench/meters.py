"""Meters of an engine in this process: seconds and rows of each pass, and accepted draft tokens.

They replace methods of the loaded models; the engine does not know them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.drafters.registry import OpenDrafter
from specserve.llm.llm import LLM
from specserve.models.memory import use_huge_pages
from specserve.models.target import TargetModel


@dataclass(slots=True)
class PassTimes:
    """Seconds of each forward pass, by the number of rows whose logits were computed."""

    seconds: dict[int, list[float]] = field(default_factory=dict)

    def median_seconds(self, rows: int) -> float:
        """Return the median of the passes with that many rows."""
        return median(self.seconds[rows])

    @property
    def total(self) -> float:
        """Seconds of all passes."""
        return sum(map(sum, self.seconds.values()))


@dataclass(slots=True)
class PassMeter:
    """Passes and verdicts of one LLM since the last `reset`."""

    target: PassTimes = field(default_factory=PassTimes)
    draft: PassTimes = field(default_factory=PassTimes)
    # Draft tokens and accepted ones, for each sequence and round with draft tokens.
    verified: list[tuple[int, int]] = field(default_factory=list)

    def reset(self) -> None:
        self.target.seconds.clear()
        self.draft.seconds.clear()
        self.verified.clear()

    @property
    def alpha(self) -> float:
        """Share of the verified draft tokens that were accepted.

        Draft tokens after a rejection are not counted, since they were not verified.
        """
        reached = sum(min(accepted + 1, drafted) for drafted, accepted in self.verified)
        return sum(accepted for _, accepted in self.verified) / max(1, reached)


def attach_meter(llm: LLM) -> PassMeter:
    """Attach a meter to an LLM in this process, for the rest of its life, and return it."""
    meter = PassMeter()
    target, drafter = models_of(llm)
    _time_passes(target.runner.network, meter.target)
    if drafter is not None:
        assert isinstance(drafter.drafter, NeuralDrafter)
        runner: Any = drafter.drafter.runner
        _time_passes(runner.network, meter.draft)
    _record_verdicts(target, meter)
    return meter


def models_of(llm: LLM) -> tuple[TargetModel, OpenDrafter | None]:
    """Return the loaded target and drafter."""
    assert llm.engine.coordinator is not None
    workers: Any = llm.engine.coordinator._workers
    target = workers.target._model
    drafter = None if workers.drafter is None else workers.drafter._model
    assert isinstance(target, TargetModel)
    assert isinstance(drafter, OpenDrafter | None)
    return target, drafter


def _time_passes(network: Any, passes: PassTimes) -> None:
    forward = network.logits

    def timed(ids: Any, layout: Any, rows: Any) -> Any:
        start = time.perf_counter()
        logits = forward(ids, layout, rows)
        passes.seconds.setdefault(len(logits), []).append(time.perf_counter() - start)
        return logits

    network.logits = timed


def _record_verdicts(model: Any, meter: PassMeter) -> None:
    verify = model.verify

    def recorded(steps: Any) -> Any:
        verdicts = verify(steps)
        decided = [step for step in steps if step.needs_verdict]
        meter.verified += [
            (len(step.drafts), verdict.accepted)
            for step, verdict in zip(decided, verdicts, strict=True)
            if step.drafts
        ]
        return verdicts

    model.verify = recorded


@dataclass(frozen=True, slots=True)
class MemoryFloor:
    """Seconds of plain decoding steps, and of reading as many bytes as the weights have.

    Both are measured in turns, because the machine drifts within seconds.
    """

    steps: list[float]
    reads: list[float]

    @property
    def ratio(self) -> float:
        """Seconds of a step over the seconds of a read."""
        return median(self.steps) / median(self.reads)


def measure_memory_floor(llm: LLM, run: Callable[[], object], *, num_bytes: int) -> MemoryFloor:
    """Measure a run with a read before each step.

    The read evicts no more from the caches than the step's own weights do.
    """
    model: Any = models_of(llm)[0]
    read, floor = _reader(num_bytes), MemoryFloor([], [])
    verify, read_end, last_start = model.verify, 0.0, 0

    def verify_after_read(steps: Any) -> Any:
        nonlocal read_end, last_start
        now = time.perf_counter()
        start = steps[0].start if steps else 0
        if start > last_start > 0:  # the same text, after its prompt
            floor.steps.append(now - read_end)
        last_start = start
        read()
        read_end = time.perf_counter()
        floor.reads.append(read_end - now)
        return verify(steps)

    model.verify = verify_after_read
    run()
    model.verify = verify
    return floor


def _reader(num_bytes: int) -> Callable[[], object]:
    """Return a function that reads that many bytes from huge pages, where the weights lie, too."""
    buffer = torch.ones(num_bytes // 8, dtype=torch.int64)
    use_huge_pages(buffer.data_ptr(), buffer.nbytes)
    return buffer.sum
