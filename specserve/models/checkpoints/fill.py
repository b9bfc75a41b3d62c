"""Weights from a checkpoint's files into a module that has only shapes: all of them, one rank's share, or those of some layers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specserve.errors import ModelError
from specserve.models.checkpoints.weights import Weights
from specserve.models.shard import Division


def fill(
    module: Any, weights: Weights, division: Division | None, *, ignored: str | None = None
) -> None:
    """Reads what a hollow model lacks, all of it or a rank's part. Raises for tensors that are missing, or more than it has use for."""
    wanted: dict[str, Tensor] = module.state_dict()
    sources = {name: _source(name, weights, module.all_tied_weights_keys) for name in wanted}
    check_complete(
        weights.directory,
        missing=[name for name, source in sources.items() if source not in weights],
    )
    read: dict[str, Tensor] = {}  # tied parameters that are held whole are read once
    for name, empty in wanted.items():
        key = (
            sources[name] if division is None or division.part(name, empty.shape) is None else name
        )
        if key not in read:
            read[key] = _read_part(weights, sources[name], division, name, empty)
        _set_tensor(module, name, read[key])
    check_complete(weights.directory, unexpected=_unexpected(module, weights, ignored))


def _source(name: str, weights: Weights, tied: dict[str, str]) -> str:
    """The name to read a parameter from: its own, or, when the file leaves it out, that of the parameter it is tied to."""
    twins = {**{source: target for target, source in tied.items()}, **tied}
    return name if name in weights else twins.get(name, name)


def _read_part(
    weights: Weights, source: str, division: Division | None, name: str, empty: Tensor
) -> Tensor:
    part = None if division is None else division.part(name, empty.shape)
    tensor = (
        weights.read(source)
        if part is None
        else weights.read(source, dim=part.dim, ranges=part.ranges)
    )
    shape = empty.shape if part is None else part.shape(empty.shape)
    if tensor.shape != shape:
        raise ModelError(
            f"{weights.directory} holds {source} in another shape than config.json implies"
        )
    is_zero = division is not None and division.is_zero(name)
    return (torch.zeros_like(tensor) if is_zero else tensor).to(empty.dtype)


def _set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    parent = module.get_submodule(owner)
    setattr(
        parent,
        leaf,
        nn.Parameter(value, requires_grad=False) if leaf in parent._parameters else value,
    )


def _unexpected(module: Any, weights: Weights, ignored: str | None) -> set[str]:
    """What nobody read, without what is `ignored`, and the buffers that older versions of the library used to write."""
    known = re.compile(
        "|".join(
            (
                r"rotary_emb\.inv_freq",
                *(module._keys_to_ignore_on_load_unexpected or ()),
                *([ignored] if ignored else ()),
            )
        )
    )
    return {name for name in weights.unread() if not known.search(name)}


def check_complete(
    directory: Path, *, missing: Iterable[str] = (), unexpected: Iterable[str] = ()
) -> None:
    for names, what in (
        (sorted(missing), "lacks"),
        (sorted(unexpected), "has, beside the model's,"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(f"{directory} {what} the tensors {', '.join(names[:3])}{more}")
