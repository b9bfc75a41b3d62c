"""The parts of an engine in this process: target and drafter without Ray.

They are opened from a config and adapted to the coordinator's protocols.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from specserve.api.tokenizer import Tokenizer
from specserve.checkpoint_files import Checkpoints, draft_translation, find_checkpoints
from specserve.claimed_memory import ClaimedMemory
from specserve.config.checks import require_no_pool
from specserve.config.hub_models import unpinned_models
from specserve.config.tree import Config
from specserve.drafters.registry import open_local_drafter
from specserve.engine.draft_placement import APART
from specserve.engine.trace import Exchange
from specserve.errors import ConfigError
from specserve.host import usable_cores
from specserve.models.device_formats import require_device_for, resolve_device
from specserve.models.target import TargetModel, open_target
from specserve.models.warmup import require_finite, warm_up
from specserve.progress import ReportProgress, no_progress
from specserve.types import (
    Drafter,
    DraftStep,
    ModelInfo,
    Proposal,
    Span,
    Target,
    Verdict,
    VerifyStep,
)

log = logging.getLogger(__name__)

Report = Callable[[Exchange], None]


class SyncTarget(Protocol):
    """A target whose calls return the answer itself."""

    def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]: ...
    def release(self, seq_ids: Sequence[int]) -> None: ...


class SyncDrafter(Protocol):
    """A drafter whose calls return the answer itself."""

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]: ...
    def release(self, seq_ids: Sequence[int]) -> None: ...


class LocalTarget:
    """A target in this process.

    Target and drafter take turns, so each may have all the threads that it wants.
    """

    def __init__(
        self, model: SyncTarget, *, threads: int | None = None, report: Report | None = None
    ) -> None:
        self._model, self._threads, self._report = model, threads, report

    async def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        _use_threads(self._threads)
        start = time.perf_counter()
        verdicts = self._model.verify(steps)
        if self._report is not None:
            self._report(_exchange("target", "verify", start))
        return verdicts

    async def release(self, seq_ids: Sequence[int]) -> None:
        self._model.release(seq_ids)


class LocalDrafter:
    """A drafter in this process."""

    def __init__(
        self, model: SyncDrafter, *, threads: int | None = None, report: Report | None = None
    ) -> None:
        self._model, self._threads, self._report = model, threads, report

    async def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        _use_threads(self._threads)
        start = time.perf_counter()
        proposals = self._model.propose(steps, start + deadline)
        if self._report is not None:
            self._report(_exchange("draft", "draft", start))
        return proposals

    async def release(self, seq_ids: Sequence[int]) -> None:
        self._model.release(seq_ids)


def run_to_end(round_: Coroutine[Any, Any, None]) -> None:
    """Run a round whose workers answer at once.

    It never waits, so it needs no event loop, and a notebook may have its own.
    """
    try:
        round_.send(None)
    except StopIteration:
        return
    raise AssertionError("a worker in this process has made the round wait")


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The workers of a coordinator, and the tokenizer in front of it."""

    tokenizer: Tokenizer
    target: Target
    info: ModelInfo
    drafter: Drafter | None = None
    draft_context: int | None = None  # None: as long as the target's
    remote_workers: bool = False  # target and drafter can be busy at the same time
    # The drafter reads prompts while the target does; else the first token would wait for both.
    drafts_prompts: bool = False
    run_round: Callable[[Coroutine[Any, Any, None]], None] = field(default=run_to_end)
    close: Callable[[], None] = field(default=lambda: None)


def open_parts(
    config: Config,
    report: Report | None = None,
    report_progress: ReportProgress = no_progress,
    require: Callable[[Checkpoints], None] | None = None,
) -> EngineParts:
    """Load the models of a config, and begin to claim their caches' memory.

    Mistakes in the paths and the tokenizers are raised before any weights are read. `report` gets
    every later exchange with the workers. `require` gets what was found before any weights are
    read, and raises to end it there.
    """
    _require_one_process(config)
    parts = _opened(config, report, report_progress, require)
    ClaimedMemory.claim_all()
    return parts


def _opened(
    config: Config,
    report: Report | None,
    report_progress: ReportProgress,
    require: Callable[[Checkpoints], None] | None,
) -> EngineParts:
    for model in unpinned_models(config):
        log.warning("%s", model)
    report_progress("finding the models")
    checkpoints = find_checkpoints(config, report_progress)
    if require is not None:
        require(checkpoints)
    if config.draft.quantize is not None:
        require_device_for(config.draft.quantize, resolve_device(config.draft.device))
    threads = config.target.threads or min(torch.get_num_threads(), usable_cores())
    report_progress("loading the target")
    target = open_target(checkpoints.target, config)
    require_finite(target)
    local_target = LocalTarget(target, threads=threads, report=report)
    info = target.info
    if config.speculation.gamma is None:
        info = replace(info, curve=warm_up(target, report_progress=report_progress))
    if config.draft.kind == "none":
        return EngineParts(checkpoints.tokenizer, local_target, info)
    assert isinstance(target, TargetModel), "the only rank verifies"
    report_progress("loading the draft")
    drafter = open_local_drafter(config, target, draft_translation(config))
    return EngineParts(
        checkpoints.tokenizer,
        local_target,
        info,
        LocalDrafter(drafter, threads=config.draft.threads or threads, report=report),
        draft_context=drafter.context,
    )


def _require_one_process(config: Config) -> None:
    """Raise ConfigError for what takes more processes than this one."""
    config.require_one_model()
    if config.target.tensor_parallel > 1:
        degree = config.target.tensor_parallel
        raise ConfigError(
            f"target.tensor_parallel {degree} takes {degree} processes, "
            f"and LLM and generate are one; use `specserve serve --tp {degree}`, "
            "or specserve.open_ray_llm from Python"
        )
    require_no_pool(config, "LLM and generate are one process")
    if config.draft.placement == APART:
        raise ConfigError(
            "draft.placement apart takes a process of its own, and LLM and generate are one; "
            "leave it out, use `specserve serve`, or specserve.open_ray_llm from Python"
        )


def _exchange(role: str, name: str, start: float) -> Exchange:
    end = time.perf_counter()
    return Exchange(role, start, end, (Span(name, start, end),))


def _use_threads(wanted: int | None) -> None:
    if wanted is not None and torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)
