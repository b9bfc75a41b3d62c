"""Weights kept as FP8 numbers with a scale for each row. Knows neither files nor kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST_FLOAT8 = 448.0
SCALES, INPUT_SCALE = "weight_scale", "input_scale"
"""The buffers of a linear layer that have the scales of its FP8 weight."""
LARGEST_INPUT = "largest_input"


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A matrix [out, in] as numbers of 8 bits, with a scale for each of its rows.

    Its products round their inputs to FP8, too: each row by a scale of its own, which is that of
    `largest_input` where the row has larger numbers, or all rows by one `input_scale`.
    """

    codes: Tensor  # FP8 (E4M3) [out, in]
    scales: Tensor  # fp32 [out, 1]
    input_scale: Tensor | None = None  # fp32 [1, 1]
    largest_input: float = math.inf

    @property
    def num_bytes(self) -> int:
        own = 0 if self.input_scale is None else self.input_scale.nbytes
        return self.codes.nbytes + self.scales.nbytes + own

    def widen(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix as plain numbers."""
        return (self.codes.float() * self.scales).to(dtype)

    def to(self, device: torch.device) -> Float8Weight:
        own = None if self.input_scale is None else self.input_scale.to(device)
        return replace(
            self, codes=self.codes.to(device), scales=self.scales.to(device), input_scale=own
        )


def join_float8(parts: list[Float8Weight]) -> Float8Weight:
    """Return weights below one another, which have the same inputs.

    Of several `input_scale`s the largest is taken, which cuts none of their inputs off; the
    weights' own numbers stay as they are.
    """
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts])  # any device joins bytes
    stated = [part.input_scale for part in parts if part.input_scale is not None]
    assert len(stated) in (0, len(parts)), "parts that round their inputs in different ways"
    return Float8Weight(
        codes.view(FLOAT8),
        torch.cat([part.scales for part in parts]),
        torch.cat(stated).amax(0, keepdim=True) if stated else None,
        min(part.largest_input for part in parts),
    )


def set_float8(layer: Any, weight: Float8Weight) -> None:
    """Give a linear layer an FP8 weight, with its scales as buffers beside it."""
    layer.weight = torch.nn.Parameter(weight.codes, requires_grad=False)
    layer.register_buffer(SCALES, weight.scales, persistent=False)
    if weight.input_scale is not None:
        layer.register_buffer(INPUT_SCALE, weight.input_scale, persistent=False)
    setattr(layer, LARGEST_INPUT, weight.largest_input)


def float8_of(layer: Any) -> Float8Weight | None:
    """Return the FP8 weight of a linear layer, or of one that ranks share; None if it has none."""
    layer = getattr(layer, "inner", layer)
    scales = getattr(layer, SCALES, None)
    if scales is None:
        return None
    return Float8Weight(
        layer.weight.detach(),
        scales,
        getattr(layer, INPUT_SCALE, None),
        getattr(layer, LARGEST_INPUT),
    )
