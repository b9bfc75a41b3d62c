"""Linear layers that add what an adapter changes, for those rows of a pass that have one.

The rest of the pass is computed as without adapters, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specserve.errors import AdapterError
from specserve.features.adapters.files import AdaptableLayer
from specserve.models.checkpoints.library import empty_module, is_encoder_decoder, read_config
from specserve.models.layers import PackedLinear, PlainLinear
from specserve.models.shard import RowWiseModule
from specserve.models.skip import layers_of


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one layer's change on this rank; the scale is part of `b`."""

    a: PackedLinear | PlainLinear  # [rows, in] -> [rows, rank]
    b: PackedLinear | PlainLinear  # [rows, rank] -> [rows, out]

    def change(self, x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
        return self.b.forward(self.a.forward(x))


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Rows of a pass whose sequences have one adapter; None: all rows."""

    rows: Tensor | None
    factors: Mapping[str, Factors]  # by the layer's name


class PassAdapters:
    """The adapters of the pass under way, shared by all layers of a network."""

    def __init__(self) -> None:
        self.adapted: Sequence[AdaptedRows] = ()


class AdaptedLinear(nn.Module):
    """A linear layer to which adapters add their changes.

    Row-invariant where the products of packed layers are: each adapter's rows are multiplied by
    themselves, so that no other adapter of the pass has an influence.
    """

    def __init__(self, inner: nn.Module, name: str, in_pass: PassAdapters) -> None:
        super().__init__()
        self.inner, self.name, self.in_pass = inner, name, in_pass

    @property
    def weight(self) -> Any:
        return self.inner.weight

    @property
    def bias(self) -> Any:
        return self.inner.bias

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        out: Tensor = self.inner(x)
        for adapted in self.in_pass.adapted:
            factors = adapted.factors.get(self.name)
            if factors is not None:
                _add(out.view(-1, out.shape[-1]), x.reshape(-1, x.shape[-1]), adapted.rows, factors)
        return out


def _add(out: Tensor, x: Tensor, rows: Tensor | None, factors: Factors) -> None:
    """Add a change to these rows of `out`, in place."""
    if rows is None:
        out.add_(factors.change(x))
        return
    own = out.index_select(0, rows) + factors.change(x.index_select(0, rows))
    out.index_copy_(0, rows, own)


def adaptable_layers(directory: Path) -> Mapping[str, AdaptableLayer]:
    """Return the layers of a checkpoint that adapters may change, by their names.

    They are the linear layers within its decoder layers; experts are none. Reads no weights.
    Raises AdapterError for an encoder-decoder.
    """
    config = read_config(directory)
    if is_encoder_decoder(config):
        raise AdapterError(
            f"adapters are for decoder-only targets, and {directory} is an encoder-decoder"
        )
    module = empty_module(config, dtype=torch.float32, attention="eager")
    prefix = layers_of(module)[0] + "."
    found: dict[str, AdaptableLayer] = {}
    for name, part in module.named_modules():
        kind = type(part)
        if not name.startswith(prefix) or ".experts" in name:
            continue
        if kind is nn.Linear:
            found[name] = AdaptableLayer(*part.weight.shape)
        elif kind.__name__ == "Conv1D":
            inputs, outputs = part.weight.shape
            found[name] = AdaptableLayer(outputs, inputs, is_transposed=True)
    return found


def adapt_layers(module: nn.Module, names: Sequence[str], in_pass: PassAdapters) -> None:
    """Make these layers of a module adaptable, inside of what sums or gathers over ranks."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        owner, part = module.get_submodule(parent), module.get_submodule(name)
        if isinstance(part, RowWiseModule):
            part.inner = AdaptedLinear(part.inner, name, in_pass)
        else:
            setattr(owner, leaf, AdaptedLinear(part, name, in_pass))
