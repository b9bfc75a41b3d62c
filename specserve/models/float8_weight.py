"""Weights kept as FP8 numbers with a scale for each row. Knows neither files nor kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST_FLOAT8 = 448.0
SCALES = "weight_scale"
"""The buffer of a linear layer that has the scales of its FP8 weight."""


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A matrix [out, in] as numbers of 8 bits, with a scale for each of its rows."""

    codes: Tensor  # FP8 (E4M3) [out, in]
    scales: Tensor  # fp32 [out, 1]

    def widen(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix as plain numbers."""
        return (self.codes.float() * self.scales).to(dtype)

    def to(self, device: torch.device) -> Float8Weight:
        return Float8Weight(self.codes.to(device), self.scales.to(device))


def join_float8(parts: list[Float8Weight]) -> Float8Weight:
    """Return weights below one another."""
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts])  # any device joins bytes
    return Float8Weight(codes.view(FLOAT8), torch.cat([part.scales for part in parts]))
