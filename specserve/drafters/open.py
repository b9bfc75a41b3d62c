"""A drafter opened from a config."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from specserve.config import Config
from specserve.drafters.anticipation import Anticipation
from specserve.drafters.fanout import Fanout
from specserve.drafters.neural import NeuralDrafter
from specserve.models.open import Placement, open_model
from specserve.types import DraftStep, Proposal


class OpenDrafter:
    """A drafter and the device that is its own. With anticipation it has use for the time between two answers."""

    def __init__(self, drafter: NeuralDrafter, anticipation: Anticipation | None) -> None:
        self._drafter, self._anticipation = drafter, anticipation
        self.context = drafter.context

    @property
    def device(self) -> torch.device:
        return self._drafter.runner.device

    @property
    def num_pages(self) -> int:
        return self._drafter.runner.cache.num_pages

    @property
    def num_pages_used(self) -> int:
        return self._drafter.runner.cache.num_used

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """The deadline is a time of `time.perf_counter`."""
        return (self._anticipation or self._drafter).propose(steps, deadline)

    def prepare(self, waiting: Callable[[], bool]) -> None:
        if self._anticipation is not None:
            self._anticipation.prepare(waiting)

    def release(self, seq_ids: Sequence[int]) -> None:
        (self._anticipation or self._drafter).release(seq_ids)


def open_drafter(checkpoint: Path, config: Config, *, target_vocab_size: int, alone: bool = False) -> OpenDrafter:
    """Raises whatever is wrong with the checkpoint, or TooLittleMemory. Only one that is `alone` on its device can work ahead."""
    opened = open_model(checkpoint, Placement.of(config.draft, config))
    anticipates = alone and config.speculation.anticipation.enabled
    fanout = Fanout(per_stop=config.speculation.anticipation.fanout)
    drafter = NeuralDrafter(
        opened.runner,
        vocab_size=opened.spec.vocab_size,
        target_vocab_size=target_vocab_size,
        context=opened.max_context,
        support=config.draft.support,
        likely=fanout.width + 1 if anticipates else 1,
    )
    return OpenDrafter(drafter, Anticipation(drafter, fanout, clock=time.perf_counter) if anticipates else None)
