"""Linear layers in the processor's own layout. On CPU in bf16, weights packed once read at the speed of memory; elsewhere plain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.models.huge import use_huge_pages
from specserve.models.shape_buckets import recurring

LONG_INNER = 1024  # from about here on oneDNN sums a single row in another order


class PackedLinear(nn.Module):
    """x W^T + b. Row-invariant: a row's result does not depend on how many rows come with it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()
        self.twice = self.in_features >= LONG_INNER
        self._product = torch.ops.mkldnn._linear_pointwise
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 16)
        use_huge_pages(
            torch.ops.mkldnn.data_ptr(self.weight), weight.numel() * weight.element_size()
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        lacking = self._lacking(len(rows))
        out: Tensor = self._product.default(
            _padded(rows, lacking), self.weight, self.bias, "none", [], ""
        )
        if lacking:
            out = out[: len(rows)]
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x W^T + b of rows [n, in], in one operation."""
        lacking = self._lacking(len(x))
        out: Tensor = self._product.binary(
            _padded(x, lacking), _padded(residual, lacking), self.weight, self.bias, "add"
        )
        return out[: len(x)] if lacking else out

    def _lacking(self, rows: int) -> int:
        """How many rows of zeros go along."""
        return 1 if self.twice and rows == 1 else recurring(rows) - rows


def _padded(rows: Tensor, lacking: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, lacking)) if lacking else rows


class PlainLinear(nn.Module):
    """The same interface where packing does not apply."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + F.linear(x, self.weight, self.bias)


def linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | PlainLinear:
    packs = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch._C._has_mkldnn
    return PackedLinear(weight, bias) if packs else PlainLinear(weight, bias)


def joined(parent: Any, *names: str) -> PackedLinear | PlainLinear:
    """Several linears of one input as one. The originals are dropped, so that memory holds the weights once."""
    parts = [getattr(parent, name) for name in names]
    weight = torch.cat([part.weight.detach() for part in parts])
    bias = torch.cat([part.bias.detach() for part in parts]) if parts[0].bias is not None else None
    for name in names:
        setattr(parent, name, None)
    return linear(weight, bias)


def moved(parent: Any, name: str) -> PackedLinear | PlainLinear:
    """One linear; the original is dropped."""
    part = getattr(parent, name)
    setattr(parent, name, None)
    return linear(part.weight, part.bias)


def pack(module: nn.Module) -> None:
    """Replace every linear layer of a model that packs; the originals are freed one by one, so memory hardly grows."""
    children: list[tuple[str, Any]] = list(module.named_children())
    for name, child in children:
        weight = _weight(child)
        if weight is None:
            pack(child)
            continue
        packed = linear(weight, child.bias)
        if isinstance(packed, PackedLinear):
            setattr(module, name, packed)


def _weight(module: Any) -> Tensor | None:  # [out, in]
    """Of a linear layer, GPT-2's transposed kind included; None for any other module."""
    if type(module) is nn.Linear:
        return module.weight
    return module.weight.t() if type(module).__name__ == "Conv1D" else None
