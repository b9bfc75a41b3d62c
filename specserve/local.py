"""An engine's parts in one process: opened from a config, and given the form in which the coordinator knows its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from specserve.api.text import Text
from specserve.config import Config
from specserve.drafters.neural import NeuralDrafter
from specserve.errors import ConfigError
from specserve.models.load import find_checkpoint
from specserve.models.open import Opened, Placement, open_model
from specserve.models.target import TargetModel
from specserve.types import Drafter, DraftStep, ModelInfo, Proposal, Target, Verdict, VerifyStep

MEMORY_SHARE = 0.5  # of what is free, for the pages of one model, unless cache.memory_fraction says otherwise


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
        return self._model.propose(steps, deadline)

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
    where = find_checkpoint(config.target.path, revision=config.target.revision)
    text = Text.load(where)
    threads = config.target.threads or torch.get_num_threads()
    if config.draft.kind == "none":
        target = _target(_open(where, config, drafts=False))
        return Parts(text, LocalTarget(target, threads=threads), target.info)
    assert config.draft.path is not None, "the config refuses a neural draft without a path"
    beside = find_checkpoint(config.draft.path)
    text.require_same(Text.load(beside))
    target = _target(_open(where, config, drafts=False))
    drafter = _drafter(_open(beside, config, drafts=True), config, target.info)
    return Parts(
        text,
        LocalTarget(target, threads=threads),
        target.info,
        LocalDrafter(drafter, threads=config.draft.threads or threads),
        draft_context=drafter.context,
    )


def _open(where: Path, config: Config, *, drafts: bool) -> Opened:
    own = config.draft if drafts else config.target
    placement = Placement(
        dtype=own.dtype,
        device=own.device,
        attention="auto" if drafts else config.target.attention,
        page_size=config.cache.page_size,
        pages=config.cache.pages,
        memory_fraction=config.cache.memory_fraction or MEMORY_SHARE,
        prefix_caching=config.cache.prefix_caching,
        max_context=config.limits.max_context,
        max_sequences=config.limits.max_running,
    )
    return open_model(where, placement)


def _target(opened: Opened) -> TargetModel:
    cache, spec = opened.runner.cache, opened.spec
    info = ModelInfo(
        vocab_size=spec.vocab_size, max_context=opened.max_context, end_ids=spec.end_ids, page_size=cache.page_size, num_pages=cache.num_pages
    )
    return TargetModel(opened.runner, info)


def _drafter(opened: Opened, config: Config, info: ModelInfo) -> NeuralDrafter:
    return NeuralDrafter(
        opened.runner,
        vocab_size=opened.spec.vocab_size,
        target_vocab_size=info.vocab_size,
        context=opened.max_context,
        support=config.draft.support,
    )


def _use_threads(wanted: int | None) -> None:
    if wanted is not None and torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)
