"""Fill an empty module with a checkpoint's weights: all, a rank's share, or some layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specserve.errors import ModelError
from specserve.models.checkpoints.quantized.float8 import StoredFloat8
from specserve.models.checkpoints.rounding import Rounding, rounded_layers
from specserve.models.checkpoints.weights import Weights
from specserve.models.float8_weight import Float8Weight, set_float8
from specserve.models.shard import Division, Part


def fill(
    module: Any,
    weights: Weights,
    division: Division | None,
    device: torch.device,
    *,
    ignored: str | None = None,
    keeps_codes: bool = False,
    float8: Collection[str] = (),
    rounding: Rounding | None = None,
) -> None:
    """Read the weights of an empty module, all of them or a rank's part, onto a device.

    With `keeps_codes`, linear layers get quantised weights as small integers, or as `rounding`
    has made them. Those named in `float8` stay as the file has them.

    Raises ModelError for tensors that are missing, and for tensors that the module has no use for
    unless their names match `ignored`.
    """
    wanted: dict[str, Tensor] = module.state_dict()
    stored = _stored_names(wanted, weights, module.all_tied_weights_keys)
    read: dict[str, Tensor] = {}  # tied parameters that are held whole are read once
    for name, empty in wanted.items():
        if name in float8:
            weight = _read_float8(weights, division, name, empty)
            set_float8(_owner(module, name), weight.to(device))
            continue
        coded = keeps_codes and _is_linear(module, name)
        is_whole = division is None or division.part(name, empty.shape) is None
        # A tied head has integers of its own: the embedding stays plain, for rows are taken of it.
        is_own = coded and weights.is_quantized(stored[name])
        key = stored[name] if is_whole and not is_own else name
        if key not in read:
            part = _read_rounded(
                weights, stored[name], division, name, empty, coded=coded, rounding=rounding
            )
            if isinstance(part, Float8Weight):
                set_float8(_owner(module, name), part.to(device))
                continue
            read[key] = part.to(device=device, dtype=empty.dtype)
        set_tensor(module, name, read[key])
    check_complete(weights.directory, unexpected=_unexpected(module, weights, ignored))


def _is_linear(module: Any, name: str) -> bool:
    """Return whether a parameter is the weight of a linear layer."""
    return name.endswith(".weight") and type(_owner(module, name)) is nn.Linear


def _owner(module: Any, name: str) -> Any:
    return module.get_submodule(name.rpartition(".")[0])


def float8_weights(module: Any, weights: Weights) -> dict[str, StoredFloat8]:
    """Return the weights that a checkpoint has in FP8 of layers that can compute with them.

    By the names of the module's parameters; head and routers are none of them.
    """
    names = sorted(f"{layer}.weight" for layer in rounded_layers(module))
    found = {name: weights.float8(name) for name in names if _is_linear(module, name)}
    return {name: weight for name, weight in found.items() if weight is not None}


def fill_shapes(module: Any, division: Division) -> None:
    """Give the parameters of an empty module the shapes of a rank's part."""
    wanted: dict[str, Tensor] = module.state_dict()
    for name, empty in wanted.items():
        part = division.part(name, empty.shape)
        if part is not None:
            set_tensor(module, name, empty.new_empty(part.shape(empty.shape)))


def _stored_names(names: Iterable[str], weights: Weights, tied: dict[str, str]) -> dict[str, str]:
    """Return the names to read parameters from. Raises ModelError for those that are missing.

    They are the parameters' own or, when the file leaves one out, that of the parameter it is tied
    to.
    """
    twins = {**{source: target for target, source in tied.items()}, **tied}
    stored = {name: name if name in weights else twins.get(name, name) for name in names}
    check_complete(
        weights.directory,
        missing=[name for name, stored_name in stored.items() if stored_name not in weights],
    )
    return stored


def _read_rounded(
    weights: Weights,
    stored_name: str,
    division: Division | None,
    name: str,
    empty: Tensor,
    *,
    coded: bool,
    rounding: Rounding | None,
) -> Tensor | Float8Weight:
    """Return a parameter, rounded if it is one of those to round; with `coded` as small numbers."""
    with weights.keeping_codes() if coded else nullcontext():
        part = _read_part(weights, stored_name, division, name, empty)
    if rounding is None or name not in rounding.weights:
        return part
    rounded = rounding.apply(part)
    return rounded if coded else rounded.widen(empty.dtype)


def _read_part(
    weights: Weights, stored_name: str, division: Division | None, name: str, empty: Tensor
) -> Tensor:
    part = None if division is None else division.part(name, empty.shape)
    tensor = (
        weights.read(stored_name)
        if part is None
        else weights.read(stored_name, dim=part.dim, ranges=part.ranges)
    )
    _check_shape(tensor, part, empty, stored_name, weights.directory)
    is_zero = division is not None and division.is_zero(name)
    return torch.zeros_like(tensor) if is_zero else tensor


def _read_float8(
    weights: Weights, division: Division | None, name: str, empty: Tensor
) -> Float8Weight:
    part = None if division is None else division.part(name, empty.shape)
    stored = weights.float8(name)
    assert stored is not None, f"{name} is not stored in FP8"
    weight = stored.read() if part is None else stored.read(dim=part.dim, ranges=part.ranges)
    _check_shape(weight.codes, part, empty, name, weights.directory)
    return weight


def _check_shape(
    found: Tensor, part: Part | None, empty: Tensor, stored_name: str, directory: Path
) -> None:
    implied = empty.shape if part is None else part.shape(empty.shape)
    if found.shape != implied:
        raise wrong_shape(directory, stored_name, found.shape, implied)


def wrong_shape(
    directory: Path, name: str, found: Iterable[int], implied: Iterable[int]
) -> ModelError:
    return ModelError(
        f"{directory} holds {name} in another shape, {[*found]}, than config.json implies, "
        f"{[*implied]}"
    )


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
