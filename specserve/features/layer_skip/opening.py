"""Open a drafter with some of the target's layers: beside the target, or on a device of its own."""

from __future__ import annotations

from pathlib import Path

from specserve.api.tokenizer import Tokenizer
from specserve.config.sections import DraftConfig
from specserve.config.tree import Config
from specserve.drafters.registry import DrafterParts, TargetVocabulary, neural_drafter
from specserve.features.layer_skip.drafter import LayerSkipDrafter
from specserve.models.checkpoints.library import read_config
from specserve.models.checkpoints.widened_copy import target_checkpoint
from specserve.models.model import ModelOptions, open_model
from specserve.models.skip import skipped_layers
from specserve.models.target import TargetModel


def open_together(config: Config, target: TargetModel) -> LayerSkipDrafter:
    """Return a drafter on the layers and pages of a target in this process."""
    return LayerSkipDrafter(
        target,
        skipped_layers(target.num_layers, config.draft.skip),
        support=config.draft.support,
    )


def open_apart(draft: DraftConfig, config: Config, vocabulary: TargetVocabulary) -> DrafterParts:
    """Open some of the target's own layers, on a device of their own."""
    checkpoint = target_checkpoint(config)
    model = open_model(
        checkpoint,
        ModelOptions.from_config(draft, config),
        skip=skipped_layers(read_config(checkpoint).num_hidden_layers, draft.skip),
    )
    neural = neural_drafter(model, draft, vocabulary)
    return DrafterParts(neural, neural.context, (neural.runner,))


def require_files(target: Path, tokenizer: Tokenizer, draft: DraftConfig) -> None:
    """Raise unless the target has the layers that the draft leaves out."""
    skipped_layers(read_config(target).num_hidden_layers, draft.skip)
