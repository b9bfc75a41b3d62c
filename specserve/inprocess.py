"""An engine's parts in one process: opened from a config, and given the form in which the coordinator knows its workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from specserve.api.tokenizer import Text
from specserve.checkpoint_files import find_checkpoints
from specserve.config.tree import Config
from specserve.drafters.registry import open_beside
from specserve.engine.trace import Exchange
from specserve.errors import ConfigError
from specserve.models.rank import open_rank
from specserve.models.target import TargetModel
from specserve.models.warmup import warm_up
from specserve.progress import Tell, silent
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

Report = Callable[[Exchange], None]


class Verifies(Protocol):
    """A target that is called and answers at once."""

    def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]: ...
    def release(self, seq_ids: Sequence[int]) -> None: ...


class Proposes(Protocol):
    """A drafter that is called and answers at once."""

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]: ...
    def release(self, seq_ids: Sequence[int]) -> None: ...


class LocalTarget:
    """A target in this process. Target and drafter take turns, so each may have all the threads that it wants."""

    def __init__(
        self, model: Verifies, *, threads: int | None = None, report: Report | None = None
    ) -> None:
        self._model, self._threads, self._report = model, threads, report

    async def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        _use_threads(self._threads)
        begun = time.perf_counter()
        verdicts = self._model.verify(steps)
        if self._report is not None:
            self._report(_exchange("target", "verify", begun))
        return verdicts

    async def release(self, seq_ids: Sequence[int]) -> None:
        self._model.release(seq_ids)


class LocalDrafter:
    """A drafter in this process."""

    def __init__(
        self, model: Proposes, *, threads: int | None = None, report: Report | None = None
    ) -> None:
        self._model, self._threads, self._report = model, threads, report

    async def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        _use_threads(self._threads)
        begun = time.perf_counter()
        proposals = self._model.propose(steps, begun + deadline)
        if self._report is not None:
            self._report(_exchange("draft", "draft", begun))
        return proposals

    async def release(self, seq_ids: Sequence[int]) -> None:
        self._model.release(seq_ids)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a coordinator is made of, and the tokenizer in front of it."""

    text: Text
    target: Target
    info: ModelInfo
    drafter: Drafter | None = None
    draft_context: int | None = None  # None: as long as the target's


def open_parts(config: Config, report: Report | None = None, tell: Tell = silent) -> Parts:
    """Raises whatever is wrong with the paths and the tokenizers before any weights are read. `report` hears of everything that they do,
    `tell` of how far opening has come.
    """
    if config.target.tensor_parallel > 1:
        degree = config.target.tensor_parallel
        raise ConfigError(
            f"target.tensor_parallel {degree} takes {degree} processes, and LLM and generate are one; use `specserve serve --tp {degree}`"
        )
    tell("finding the models")
    found = find_checkpoints(config)
    threads = config.target.threads or torch.get_num_threads()
    tell("loading the target")
    target = open_rank(found.target, config)
    beside = LocalTarget(target, threads=threads, report=report)
    info = (
        replace(target.info, curve=warm_up(target, tell=tell))
        if config.speculation.gamma is None
        else target.info
    )
    if config.draft.kind == "none":
        return Parts(found.text, beside, info)
    assert isinstance(target, TargetModel), "the only rank judges"
    tell("loading the draft")
    drafter = open_beside(config, target)
    ahead = LocalDrafter(drafter, threads=config.draft.threads or threads, report=report)
    return Parts(found.text, beside, info, ahead, draft_context=drafter.context)


def _exchange(role: str, name: str, begun: float) -> Exchange:
    ended = time.perf_counter()
    return Exchange(role, begun, ended, (Span(name, begun, ended),))


def _use_threads(wanted: int | None) -> None:
    if wanted is not None and torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)
