"""A drafter opened from a config."""

from __future__ import annotations

from pathlib import Path

from specserve.config import Config
from specserve.drafters.neural import NeuralDrafter
from specserve.models.open import Placement, open_model


def open_drafter(checkpoint: Path, config: Config, *, target_vocab_size: int) -> NeuralDrafter:
    """Raises whatever is wrong with the checkpoint, or TooLittleMemory."""
    opened = open_model(checkpoint, Placement.of(config.draft, config))
    return NeuralDrafter(
        opened.runner,
        vocab_size=opened.spec.vocab_size,
        target_vocab_size=target_vocab_size,
        context=opened.max_context,
        support=config.draft.support,
    )
