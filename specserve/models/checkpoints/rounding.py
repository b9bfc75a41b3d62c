"""Round matrices to small numbers with scales, and choose which ones. Knows no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specserve.errors import UnsupportedModel
from specserve.models.coded_weight import RANGES, CodedWeight
from specserve.models.float8_weight import FLOAT8, LARGEST_FLOAT8, Float8Weight
from specserve.models.gpu.float8_kernels import MULTIPLE

BITS: Mapping[str, int] = {"int8": 8, "int4": 4, "fp8": 8}
"""By what `draft.quantize` and `specserve quantize --to` name."""

GROUPS = (128, 64, 32)
"""Columns that share a scale in 4 bits: the first of these that divides every matrix."""
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Shares of the largest number that a group's integers may reach to; the best is taken.

The largest is then cut, and all others are rounded more finely.
"""
ROUTERS = (".gate", ".router")
"""Names of layers that choose experts, which are small and left as they are."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """Weights of a module that are rounded as they are read, and to what: a name of `BITS`."""

    to: str
    weights: frozenset[str]
    group: int  # columns that share a scale; 0 for whole rows

    @classmethod
    def from_module(cls, module: Any, to: str) -> Rounding:
        """Return what `specserve quantize` would round of a module, and kernels can multiply.

        Raises UnsupportedModel.
        """
        weights = {f"{name}.weight" for name in rounded_layers(module)}
        if not weights:
            raise UnsupportedModel("it cannot be quantized: no matrix is in a linear layer")
        if to == "fp8":
            weights = {name for name in weights if _is_for_float8(module.get_parameter(name))}
            if not weights:
                raise UnsupportedModel(
                    f"fp8 needs matrices whose rows and columns are multiples of {MULTIPLE}, and "
                    "it has none; use int8"
                )
        shapes = {name: module.get_parameter(name).shape[1] for name in sorted(weights)}
        return cls(to, frozenset(weights), group_for(shapes) if to == "int4" else 0)

    def num_saved_bytes(self, module: Any, dtype: torch.dtype) -> int:
        """Return how many bytes fewer the rounded weights of a module take than its own.

        The module may have shapes instead of weights.
        """
        saved = 0
        for name in self.weights:
            outputs, width = module.get_parameter(name).shape
            num_groups = width // (self.group or width)
            held = outputs * (width * BITS[self.to] // 8 + num_groups * torch.float32.itemsize)
            saved += outputs * width * dtype.itemsize - held
        return saved

    def apply(self, matrix: Tensor) -> CodedWeight | Float8Weight:
        if self.to == "fp8":
            codes, scales = round_to_float8(matrix.float(), matrix.dtype)
            return Float8Weight(codes, scales.float())
        group = self.group or matrix.shape[1]
        return CodedWeight.from_integers(
            *round_to_integers(matrix.float(), BITS[self.to], group, matrix.dtype)
        )


def _is_for_float8(matrix: Tensor) -> bool:
    return all(size % MULTIPLE == 0 for size in matrix.shape)


def linear_layers(module: Any) -> set[str]:
    return {name for name, part in module.named_modules() if type(part) is nn.Linear}


def rounded_layers(module: Any) -> set[str]:
    """Return the linear layers that are rounded: all but the vocabulary head and routers."""
    head = module.get_output_embeddings()
    return {
        name
        for name in linear_layers(module)
        if module.get_submodule(name) is not head and not name.endswith(ROUTERS)
    }


def group_for(widths: Mapping[str, int]) -> int:
    """Return how many columns share a scale in 4 bits. Raises UnsupportedModel for odd widths."""
    for group in GROUPS:
        if all(width % group == 0 for width in widths.values()):
            return group
    name, width = next((name, width) for name, width in widths.items() if width % GROUPS[-1])
    raise UnsupportedModel(
        f"int4 needs rows of a multiple of {GROUPS[-1]} numbers, and {name} has {width}; use int8"
    )


def round_to_integers(
    matrix: Tensor, bits: int, group: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return int8 integers [out, in] and scales [out, groups] that are nearest to a matrix.

    In 4 bits, a group's scale is the one of several with the smallest error in its square.
    """
    low, high = RANGES[bits]
    blocks = matrix.view(len(matrix), -1, group)
    largest = blocks.abs().amax(-1, keepdim=True)
    best, error = torch.zeros_like(blocks), torch.full_like(largest, torch.inf)
    scales = torch.zeros_like(largest, dtype=scale_dtype)
    for clip in CLIPS if bits == 4 else CLIPS[:1]:
        scale = usable_scales(clip * largest / (high + 0.5), scale_dtype)
        integers = (blocks / scale.float()).round().clamp(low, high)
        own = (integers * scale.float() - blocks).square().sum(-1, keepdim=True)
        is_better = own < error
        best, error = torch.where(is_better, integers, best), torch.where(is_better, own, error)
        scales = torch.where(is_better, scale, scales)
    return best.flatten(1).to(torch.int8), scales.squeeze(-1)


def round_to_float8(matrix: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return FP8 numbers [out, in] and scales [out, 1] that are nearest to a matrix."""
    scales = usable_scales(matrix.abs().amax(1, keepdim=True) / LARGEST_FLOAT8, scale_dtype)
    codes = (matrix / scales.float()).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
    return codes.to(FLOAT8), scales


def usable_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales as they are stored; 1 where all numbers are 0."""
    stored = scales.to(dtype)
    return torch.where(stored == 0, torch.ones_like(stored), stored)


def pack_integers(integers: Tensor, bits: int) -> Tensor:
    """Return integers [out, in] in words of 32 bits, lowest first, with the smallest one as 0."""
    per = 32 // bits
    codes = (integers.long() - RANGES[bits][0]).view(len(integers), -1, per)
    words = (codes << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
