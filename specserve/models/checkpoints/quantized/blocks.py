"""Turn stored codes, scales and zero points into numbers; the parts that formats share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specserve.models.checkpoints.tensors import StoredTensors
from specserve.models.coded_weight import RANGES, CodedWeight

ALL = slice(None)
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1 (OCP Microscaling Formats 1.0, table 5); the fourth bit is the sign."""
E8M0_BIAS = 127


class Format(Protocol):
    """A way of storing matrices; `name` is that of the parameter."""

    def shape(self, stored: StoredTensors, name: str) -> tuple[int, ...] | None:
        """Return the shape of the plain matrix; None if it is not stored in this format."""

    def read(self, stored: StoredTensors, name: str, rows: slice, columns: slice) -> Block:
        """Return some rows and columns."""

    def companions(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors that describe a matrix, beside its codes."""


@dataclass(frozen=True, slots=True)
class Block:
    """Codes of some rows and columns of a matrix, and how they become numbers."""

    codes: Tensor  # [rows, columns]
    scales: Tensor  # [rows or 1, groups]
    groups: Tensor  # the group of each column
    zeros: Tensor | None = None  # [rows or 1, groups]
    minima: Tensor | None = None  # [rows, groups]

    def widen(self) -> Tensor:
        """Return (codes - zeros) * scales + minima."""
        numbers = self.codes.float()
        if self.zeros is not None:
            numbers = numbers - self.zeros.float()[:, self.groups]
        numbers = numbers * self.scales.float()[:, self.groups]
        return numbers if self.minima is None else numbers + self.minima[:, self.groups]

    def coded(self) -> CodedWeight | None:
        """Return integers less their zero points with scales, as kernels take them.

        None if the codes are none, or if neighbouring columns do not share scales evenly.
        """
        groups, counts = torch.unique_consecutive(self.groups, return_counts=True)
        span = int(counts[0])
        if self.codes.is_floating_point() or span % 2 or bool((counts != span).any()):
            return None
        integers = self.codes.short()
        if self.zeros is not None:
            integers = integers - self.zeros.short()[:, self.groups]
        low, high = RANGES[8]
        if int(integers.min()) < low or int(integers.max()) > high:
            return None
        scales = self.scales.float()[:, groups].expand(len(integers), -1).contiguous()
        minima = None if self.minima is None else self.minima[:, groups]
        return CodedWeight.from_integers(integers.to(torch.int8), scales, minima)


def block_of(numbers: Tensor) -> Block:
    """Return numbers as a block, for formats whose codes are no integers."""
    return Block(numbers, torch.ones(1, 1), torch.zeros(numbers.shape[-1], dtype=torch.long))


def is_weight(name: str) -> bool:
    return name.endswith(".weight")


def owner_of(name: str) -> str:
    return name.removesuffix(".weight")


def column_groups(columns: slice, size: int) -> Tensor:
    """Return the group of each column, for groups of `size`; 0 or less is one group for all."""
    column = torch.arange(columns.start, columns.stop)
    return column // size if size > 0 else torch.zeros_like(column)


def covering(wanted: slice, per: int) -> tuple[slice, slice]:
    """Return the integers that hold a range of codes, and where the range lies in them."""
    first, stop = wanted.start // per, -(-wanted.stop // per)
    return slice(first, stop), slice(wanted.start - first * per, wanted.stop - first * per)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of integers of 32 bits, lowest first, along the last dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: Tensor = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)  # drops the copied signs
    return codes.flatten(-2)


def fp4(packed: Tensor) -> Tensor:
    """Return the E2M1 numbers of bytes, lower half first, along the last dimension."""
    values = torch.tensor((*FP4_VALUES, *(-value for value in FP4_VALUES)))
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return values[codes.long()]


def as_scales(stored: Tensor) -> Tensor:
    """Return scales in fp32; bytes hold exponents of two (E8M0)."""
    numbers = stored.float()
    return torch.exp2(numbers - E8M0_BIAS) if stored.dtype == torch.uint8 else numbers


def as_matrix(scales: Tensor) -> Tensor:
    """Return scales as [rows or 1, groups]: one for all, one a row, or as they are."""
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    return scales.reshape(-1, 1) if scales.dim() == 1 else scales
