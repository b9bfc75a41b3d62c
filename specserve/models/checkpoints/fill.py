"""Fill an empty module with a checkpoint's weights: all, a rank's share, or some layers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specserve.errors import ModelError
from specserve.models.checkpoints.rounding import Rounding
from specserve.models.checkpoints.weights import Weights
from specserve.models.float8_weight import SCALES, Float8Weight
from specserve.models.shard import Division


def fill(
    module: Any,
    weights: Weights,
    division: Division | None,
    device: torch.device,
    *,
    ignored: str | None = None,
    keeps_codes: bool = False,
    rounding: Rounding | None = None,
) -> None:
    """Read the weights of an empty module, all of them or a rank's part, onto a device.

    With `keeps_codes`, linear layers get quantised weights as small integers, or as `rounding`
    has made them.

    Raises ModelError for tensors that are missing, and for tensors that the module has no use for
    unless their names match `ignored`.
    """
    wanted: dict[str, Tensor] = module.state_dict()
    stored = {name: _stored_name(name, weights, module.all_tied_weights_keys) for name in wanted}
    check_complete(
        weights.directory,
        missing=[name for name, stored_name in stored.items() if stored_name not in weights],
    )
    read: dict[str, Tensor] = {}  # tied parameters that are held whole are read once
    for name, empty in wanted.items():
        key = stored[name] if division is None or division.part(name, empty.shape) is None else name
        if key not in read:
            coded = keeps_codes and name == key and _is_linear(module, name)
            with weights.keeping_codes() if coded else nullcontext():
                part = _read_part(weights, stored[name], division, name, empty)
            if rounding is not None and name in rounding.weights:
                rounded = rounding.apply(part)
                if not coded:
                    part = rounded.widen(empty.dtype)
                elif isinstance(rounded, Float8Weight):
                    _set_float8(module, name, rounded.to(device))
                    continue
                else:
                    part = rounded
            read[key] = part.to(device=device, dtype=empty.dtype)
        set_tensor(module, name, read[key])
    check_complete(weights.directory, unexpected=_unexpected(module, weights, ignored))


def _is_linear(module: Any, name: str) -> bool:
    """Return whether a parameter is the weight of a linear layer alone, and of no embedding."""
    owner, _, leaf = name.rpartition(".")
    tied = {*module.all_tied_weights_keys, *module.all_tied_weights_keys.values()}
    return leaf == "weight" and name not in tied and type(module.get_submodule(owner)) is nn.Linear


def _set_float8(module: Any, name: str, weight: Float8Weight) -> None:
    """Replace the weight of a linear layer, which gets its scales beside it."""
    set_tensor(module, name, weight.codes)
    layer = module.get_submodule(name.rpartition(".")[0])
    layer.register_buffer(SCALES, weight.scales, persistent=False)


def fill_shapes(module: Any, division: Division) -> None:
    """Give the parameters of an empty module the shapes of a rank's part."""
    wanted: dict[str, Tensor] = module.state_dict()
    for name, empty in wanted.items():
        part = division.part(name, empty.shape)
        if part is not None:
            set_tensor(module, name, empty.new_empty(part.shape(empty.shape)))


def _stored_name(name: str, weights: Weights, tied: dict[str, str]) -> str:
    """Return the name to read a parameter from.

    It is the parameter's own or, when the file leaves it out, that of the parameter it is tied to.
    """
    twins = {**{source: target for target, source in tied.items()}, **tied}
    return name if name in weights else twins.get(name, name)


def _read_part(
    weights: Weights, stored_name: str, division: Division | None, name: str, empty: Tensor
) -> Tensor:
    part = None if division is None else division.part(name, empty.shape)
    tensor = (
        weights.read(stored_name)
        if part is None
        else weights.read(stored_name, dim=part.dim, ranges=part.ranges)
    )
    shape = empty.shape if part is None else part.shape(empty.shape)
    if tensor.shape != shape:
        raise ModelError(
            f"{weights.directory} holds {stored_name} in another shape than config.json implies"
        )
    is_zero = division is not None and division.is_zero(name)
    return torch.zeros_like(tensor) if is_zero else tensor


def set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter or buffer."""
    owner, _, leaf = name.rpartition(".")
    parent = module.get_submodule(owner)
    setattr(
        parent,
        leaf,
        nn.Parameter(value, requires_grad=False) if leaf in parent._parameters else value,
    )


def _unexpected(module: Any, weights: Weights, ignored: str | None) -> set[str]:
    """Return the tensors that were not read and are not expected to be unused.

    Expected are those that match `ignored`, and buffers that older versions of the library wrote.
    """
    known = re.compile(
        "|".join(
            (
                r"rotary_emb\.inv_freq",
                *_unused_names(module),
                *([ignored] if ignored else ()),
            )
        )
    )
    return {name for name in weights.unread() if not known.search(name)}


def _unused_names(module: Any) -> set[str]:
    """Return patterns of tensors that the library's modules state to have no use for."""
    stated = (
        getattr(part, "_keys_to_ignore_on_load_unexpected", None) for part in module.modules()
    )
    return {pattern for patterns in stated for pattern in patterns or ()}


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
