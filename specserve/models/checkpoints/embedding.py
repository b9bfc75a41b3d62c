"""Read the input embedding or the vocabulary head of a checkpoint, and nothing else of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
        return _read(directory, module, module.get_input_embeddings(), dtype)


def load_head(directory: Path, *, dtype: torch.dtype) -> Tensor:  # [vocab, hidden]
    """Return the vocabulary head of a checkpoint: its embedding, where both are one.

    Raises ModelError if it has none by the usual name.
    """
    with quiet_library(), library_errors(directory):
        config = read_config(directory)
        module = empty_module(config, dtype=dtype, attention="eager")
        is_tied = getattr(config, "tie_word_embeddings", False)
        part = module.get_input_embeddings() if is_tied else module.get_output_embeddings()
        return _read(directory, module, part, dtype)


def _read(directory: Path, module: Any, part: Any, dtype: torch.dtype) -> Tensor:
    owner = next(name for name, each in module.named_modules() if each is part)
    weights = Weights(directory, prefix=base_model_name(module), dtype=dtype)
    if f"{owner}.weight" not in weights:
        raise ModelError(f"{directory} has no tensor {owner}.weight")
    return weights.read(f"{owner}.weight")
