"""Read the input embedding of a checkpoint, and nothing else of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specserve.errors import ModelError
from specserve.models.checkpoints.library import (
    base_model_name,
    empty_module,
    library_errors,
    quiet_library,
    read_config,
)
from specserve.models.checkpoints.weights import Weights


def load_embedding(directory: Path, *, dtype: torch.dtype) -> Tensor:  # [vocab, hidden]
    """Return the embedding of a checkpoint. Raises ModelError if it has none by the usual name."""
    with quiet_library(), library_errors(directory):
        module = empty_module(read_config(directory), dtype=dtype, attention="eager")
        embedding = module.get_input_embeddings()
        owner = next(name for name, part in module.named_modules() if part is embedding)
        weights = Weights(directory, prefix=base_model_name(module), dtype=dtype)
        if f"{owner}.weight" not in weights:
            raise ModelError(f"{directory} has no tensor {owner}.weight")
        return weights.read(f"{owner}.weight")
