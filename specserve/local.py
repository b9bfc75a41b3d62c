"""An engine's parts in one process: opened from a config, and given the form in which the coordinator knows its workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from specserve.api.text import Text
from specserve.checkpoints import find_checkpoints
from specserve.config import Config
from specserve.drafters.open import open_drafter
from specserve.errors import ConfigError
from specserve.models.rank import open_rank
from specserve.models.warmup import warm_up
from specserve.types import Drafter, DraftStep, ModelInfo, Proposal, Target, Verdict, VerifyStep


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

    def __init__(self, model: Verifies, *, threads: int | None = None) -> None:
        self._model, self._threads = model, threads

    async def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        _use_threads(self._threads)
        return self._model.verify(steps)

    async def release(self, seq_ids: Sequence[int]) -> None:
        self._model.release(seq_ids)


class LocalDrafter:
    """A drafter in this process."""

    def __init__(self, model: Proposes, *, threads: int | None = None) -> None:
        self._model, self._threads = model, threads

    async def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        _use_threads(self._threads)
        return self._model.propose(steps, time.perf_counter() + deadline)

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


def open_parts(config: Config) -> Parts:
    """Raises whatever is wrong with the paths and the tokenizers before any weights are read."""
    if config.target.tensor_parallel > 1:
        degree = config.target.tensor_parallel
        raise ConfigError(
            f"target.tensor_parallel {degree} takes {degree} processes, and LLM and generate are one; use `specserve serve --tp {degree}`"
        )
    found = find_checkpoints(config)
    threads = config.target.threads or torch.get_num_threads()
    target = open_rank(found.target, config)
    beside = LocalTarget(target, threads=threads)
    info = replace(target.info, curve=warm_up(target)) if config.speculation.gamma is None else target.info
    if found.draft is None:
        return Parts(found.text, beside, info)
    drafter = open_drafter(found.draft, config, target_vocab_size=target.info.vocab_size)
    return Parts(found.text, beside, info, LocalDrafter(drafter, threads=config.draft.threads or threads), draft_context=drafter.context)


def _use_threads(wanted: int | None) -> None:
    if wanted is not None and torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)
