"""What a config alone says of a model, or of one rank's share of it: its shape and the number of its parameters. Reads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specserve.models.checkpoints.load import (
    Architecture,
    architecture,
    division_of,
    hollow,
    library_errors,
    quiet_library,
    read_config,
)
from specserve.models.plans import check_plan
from specserve.models.shard import Division, Shard


@dataclass(frozen=True, slots=True)
class Described:
    """A model without its weights, or one rank's share of it."""

    spec: Architecture
    num_parameters: int


def describe(directory: Path, *, ranks: int = 1) -> Described:
    """What a config alone says of one of so many ranks: the first, which holds the most. Raises NoShardingPlan if they cannot share it."""
    config = read_config(directory)
    check_plan(config, ranks)
    with quiet_library(), library_errors(directory):
        module = hollow(config, dtype=torch.bfloat16, attention="eager")
        spec = architecture(directory, config, ranks)
        if ranks == 1:
            twice = module.get_output_embeddings().weight.numel() if spec.tied else 0
            return Described(
                spec, sum(parameter.numel() for parameter in module.parameters()) - twice
            )
        division = division_of(module, Shard(0, ranks))
        held: dict[str, Tensor] = (
            module.state_dict()
        )  # the embedding and, apart from it, a share of the head
        return Described(
            spec, sum(_num_held(division, name, tensor.shape) for name, tensor in held.items())
        )


def _num_held(division: Division, name: str, shape: torch.Size) -> int:
    part = division.part(name, shape)
    return (shape if part is None else part.shape(shape)).numel()
