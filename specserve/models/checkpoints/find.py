"""Find a checkpoint, in a local directory or on the hub, and describe its model from config.json.

Reads no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from specserve.config.hub_models import CHECKPOINT_REMEDY, is_hub_name
from specserve.errors import ModelNotFound, first_line
from specserve.models.checkpoints.architecture import Architecture, architecture
from specserve.models.checkpoints.gguf.files import find_gguf
from specserve.models.checkpoints.gguf.opening import open_gguf
from specserve.models.checkpoints.library import (
    empty_module,
    library_errors,
    quiet_library,
    read_config,
)
from specserve.models.checkpoints.load import make_division
from specserve.models.checkpoints.weights import weight_files
from specserve.models.plans import check_plan
from specserve.models.shard import Division, Shard

TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.txt")
CHECKPOINT_FILES = ("*.safetensors", *TOKENIZER_FILES)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model without its weights, or one rank's share of it."""

    spec: Architecture
    num_parameters: int


def find_checkpoint(
    model: str | Path, *, revision: str | None = None, key: str = "the model"
) -> Path:
    """Return the directory of a checkpoint with weights.

    `model` is a local path, of a GGUF file too, or else a hub name, which is downloaded unless it
    lies in the hub's cache. `key` names the model in error messages. Raises ModelNotFound, or
    ModelError without weights.
    """
    path = find_config(model, revision=revision, patterns=CHECKPOINT_FILES, key=key)
    weight_files(path)
    return path


def find_config(
    model: str | Path,
    *,
    revision: str | None = None,
    patterns: Sequence[str] = ("*.json",),
    key: str = "the model",
) -> Path:
    """Return the directory of a checkpoint of which only the config is needed.

    Of a hub name only the files that match `patterns` are fetched. Raises ModelNotFound, or
    ModelError for a GGUF file that cannot be opened.
    """
    path = Path(model).expanduser()
    if not path.exists():
        path = _download(str(model), revision, patterns, key)
    if (file := find_gguf(path)) is not None:
        return open_gguf(file)
    if not path.is_dir():
        raise ModelNotFound(f"{key} {model} is a file; {CHECKPOINT_REMEDY}")
    if not (path / "config.json").is_file():
        raise ModelNotFound(
            f"{key} {model} is no model: it has no config.json; {CHECKPOINT_REMEDY}"
        )
    return path


def _download(name: str, revision: str | None, patterns: Sequence[str], key: str) -> Path:
    if not is_hub_name(name):
        raise ModelNotFound(f"{key} {name} does not exist; {CHECKPOINT_REMEDY}")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    # No such name or revision, no network, or a name that the hub could not have.
    except (OSError, ValueError) as error:
        at = f" at revision {revision}" if revision else ""
        raise ModelNotFound(
            f"{key} {name} is no local directory, and the hub did not give it{at}: "
            f"{first_line(error)}; {CHECKPOINT_REMEDY}"
        ) from error


def describe(directory: Path, *, ranks: int = 1) -> ModelDescription:
    """Return what a config alone says of the first of `ranks` ranks, which holds the most.

    Raises NoShardingPlan if the ranks cannot share the model.
    """
    config = read_config(directory)
    check_plan(config, ranks)
    with quiet_library(), library_errors(directory):
        module = empty_module(config, dtype=torch.bfloat16, attention="eager")
        spec = architecture(directory, config, ranks)
        if ranks == 1:
            head, embedding = (
                part.weight
                for part in (module.get_output_embeddings(), module.get_input_embeddings())
            )
            counted_twice = head.numel() if spec.tied and head is not embedding else 0
            return ModelDescription(
                spec, sum(parameter.numel() for parameter in module.parameters()) - counted_twice
            )
        division = make_division(module, Shard(0, ranks))
        # The embedding is held whole and, apart from it, a share of the head.
        held: dict[str, Tensor] = module.state_dict()
        return ModelDescription(
            spec, sum(_num_held(division, name, tensor.shape) for name, tensor in held.items())
        )


def _num_held(division: Division, name: str, shape: torch.Size) -> int:
    part = division.part(name, shape)
    return (shape if part is None else part.shape(shape)).numel()
