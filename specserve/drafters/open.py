"""A drafter opened from a config."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from specserve.config import Config
from specserve.drafters.anticipation import Anticipation
from specserve.drafters.base import Forks
from specserve.drafters.fanout import Fanout
from specserve.drafters.kinds import KINDS, open_statistical
from specserve.drafters.neural import NeuralDrafter
from specserve.drafters.tied import HeadsDrafter, SkippingDrafter
from specserve.models.load import find_checkpoint, read_config
from specserve.models.open import Opened, Placement, open_model
from specserve.models.runner import Runner
from specserve.models.skip import skipped
from specserve.models.target import TargetModel
from specserve.types import DraftStep, Foreseen, Proposal

TIED: Mapping[str, Callable[[Config, TargetModel], SkippingDrafter | HeadsDrafter]] = {
    "layer_skip": SkippingDrafter.of,
    "heads": HeadsDrafter.of,
}  # to a target in the same process


class OpenDrafter:
    """A drafter and the device that is its own, if it needs one. With anticipation it has use for the time between two answers."""

    def __init__(self, drafter: Forks, *, context: int, runner: Runner | None, fanout: Fanout | None) -> None:
        self._drafter, self._runner, self.context = drafter, runner, context
        self._anticipation = None if fanout is None else Anticipation(drafter, fanout, clock=time.perf_counter)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self._runner is None else self._runner.device

    @property
    def num_pages(self) -> int:
        """Of its cache; 0 where it has none."""
        return 0 if self._runner is None else self._runner.cache.num_pages

    @property
    def num_pages_used(self) -> int:
        return 0 if self._runner is None else self._runner.cache.num_used

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """The deadline is a time of `time.perf_counter`."""
        if self._anticipation is not None:
            return self._anticipation.propose(steps, deadline)
        return self._drafter.draft(steps, lambda: time.perf_counter() > deadline)

    def prepare(self, waiting: Callable[[], bool]) -> None:
        if self._anticipation is not None:
            self._anticipation.prepare(waiting)

    def foreseen(self) -> tuple[Foreseen, ...]:
        return () if self._anticipation is None else self._anticipation.foreseen()

    def release(self, seq_ids: Sequence[int]) -> None:
        (self._anticipation or self._drafter).release(seq_ids)


def open_drafter(config: Config, *, target_vocab_size: int, alone: bool = False) -> OpenDrafter:
    """Raises whatever is wrong with its files, or TooLittleMemory. Only one that is `alone` on its device can work ahead."""
    draft, anticipation = config.draft, config.speculation.anticipation
    fanout = Fanout(per_stop=anticipation.fanout) if alone and anticipation.enabled else None
    if draft.kind in KINDS:
        path = None if draft.path is None else Path(draft.path)
        statistical = open_statistical(draft.kind, path=path, learn=draft.learn, support=draft.support, vocab_size=target_vocab_size)
        return OpenDrafter(statistical, context=statistical.context, runner=None, fanout=fanout)
    opened = _opened(config)
    neural = NeuralDrafter(
        opened.runner,
        vocab_size=opened.spec.vocab_size,
        target_vocab_size=target_vocab_size,
        context=opened.max_context,
        support=draft.support,
    )
    return OpenDrafter(neural, context=opened.max_context, runner=opened.runner, fanout=fanout)


def open_beside(config: Config, target: TargetModel) -> OpenDrafter | SkippingDrafter | HeadsDrafter:
    """What drafts in the target's own process. Raises likewise."""
    if config.draft.kind in TIED:
        return TIED[config.draft.kind](config, target)
    return open_drafter(config, target_vocab_size=target.info.vocab_size)


def _opened(config: Config) -> Opened:
    """The model that drafts, which may be the target's without some layers."""
    own, where = config.target, Placement.of(config.draft, config)
    if config.draft.kind == "layer_skip":
        checkpoint = find_checkpoint(own.path, revision=own.revision)
        return open_model(checkpoint, where, skip=skipped(read_config(checkpoint).num_hidden_layers, config.draft.skip))
    assert config.draft.path is not None, "the config has been checked"
    return open_model(find_checkpoint(config.draft.path), where)
