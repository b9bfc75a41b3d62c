"""Weights kept as small integers with scales, and minima, which stand for bf16 matrices.

Knows neither files nor kernels. A kernel that has no use for the integers gets the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

ZERO_CODE = 8
"""What is stored of a zero in 4 bits, which have no sign."""
RANGES: Mapping[int, tuple[int, int]] = {8: (-128, 127), 4: (-8, 7)}
"""Smallest and largest integer of that many bits."""
RANGE_OVER_MINIMA = (0, 15)
"""The same in 4 bits, of integers to which a minimum is added."""


class CodedWeight(Tensor):
    """A matrix [out, in] of bf16 numbers, as integers of 8 or 4 bits with scales by groups.

    A number is its integer times the scale of its group, plus the group's minimum where there are
    any.
    Rows of several are joined, and the whole is detached, as integers. Any other operation of torch
    sees the widened matrix.
    """

    codes: Tensor  # int8 [out, in]; of 4 bits, uint8 [out, in / 2], lower half first
    scales: Tensor  # fp32 [out, groups]
    bits: int
    minima: Tensor | None  # fp32 [out, groups]

    @staticmethod
    def __new__(
        cls, codes: Tensor, scales: Tensor, bits: int, minima: Tensor | None = None
    ) -> CodedWeight:
        outputs, width = codes.shape
        made: CodedWeight = Tensor._make_wrapper_subclass(
            cls, (outputs, width * 8 // bits), dtype=torch.bfloat16, device=codes.device
        )
        made.codes, made.scales, made.bits, made.minima = codes, scales, bits, minima
        return made

    @classmethod
    def from_integers(
        cls, integers: Tensor, scales: Tensor, minima: Tensor | None = None
    ) -> CodedWeight:
        """Return a weight of int8 integers [out, in], in 4 bits if all of them fit."""
        low, high = RANGES[4] if minima is None else RANGE_OVER_MINIMA
        is_small = int(integers.min()) >= low and int(integers.max()) <= high
        minima = None if minima is None else minima.float()
        if not is_small or integers.shape[1] % 2:
            return cls(integers, scales.float(), 8, minima)
        halves = (integers - low).view(torch.uint8).view(len(integers), -1, 2)
        return cls(halves[..., 0] | halves[..., 1] << 4, scales.float(), 4, minima)

    def __init__(
        self, codes: Tensor, scales: Tensor, bits: int, minima: Tensor | None = None
    ) -> None:
        super().__init__()

    @property
    def integers(self) -> Tensor:
        """The integers, int8 [out, in]."""
        if self.bits == 8:
            return self.codes
        halves = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1)
        return halves.view(torch.int8) - (ZERO_CODE if self.minima is None else 0)

    @property
    def num_bytes(self) -> int:
        minima = 0 if self.minima is None else self.minima.nbytes
        return self.codes.nbytes + self.scales.nbytes + minima

    def widen(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the matrix as plain numbers."""
        groups = self.scales.shape[1]
        by_groups = self.integers.view(len(self), groups, -1).float()
        numbers: Tensor = by_groups * self.scales.unsqueeze(-1)
        if self.minima is not None:
            numbers = numbers + self.minima.unsqueeze(-1)
        return numbers.flatten(1).to(dtype)

    def detach(self) -> CodedWeight:
        # Not left to torch, which fails to detach what was made outside of its inference mode.
        return CodedWeight(self.codes, self.scales, self.bits, self.minima)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CodedWeight({list(self.shape)}, bits={self.bits}, groups={self.scales.shape[1]})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.ops.aten.cat.default:
            joined = join_rows(args[0]) if len(args) == 1 or args[1] in (0, -2) else None
            if joined is not None:
                return joined
        return function(*tree_map(_widened, args), **tree_map(_widened, dict(kwargs or {})))


def join_rows(parts: Sequence[Tensor]) -> CodedWeight | None:
    """Return weights below one another; None if they have to be plain matrices for that."""
    return join_coded(parts, torch.cat)


def join_coded(
    parts: Sequence[Tensor], join: Callable[[list[Tensor]], Tensor]
) -> CodedWeight | None:
    """Return the weight whose integers, scales and minima are joined, in the smallest groups.

    Weights that differ in their bits, or of which some have minima, have 8 bits. None if not all
    have integers, or if groups lie across one another.
    """
    coded = [part for part in parts if isinstance(part, CodedWeight)]
    groups = max((part.scales.shape[1] for part in coded), default=1)
    if len(coded) < len(parts) or any(groups % part.scales.shape[1] for part in coded):
        return None
    kinds = {(part.bits, part.minima is None) for part in coded}
    codes = join([part.codes if len(kinds) == 1 else part.integers for part in coded])
    scales = join([_spread(part.scales, groups) for part in coded])
    if all(part.minima is None for part in coded):
        return CodedWeight(codes, scales, coded[0].bits if len(kinds) == 1 else 8)
    minima = [torch.zeros_like(one.scales) if one.minima is None else one.minima for one in coded]
    joined = join([_spread(numbers, groups) for numbers in minima])
    return CodedWeight(codes, scales, coded[0].bits if len(kinds) == 1 else 8, joined)


def _spread(numbers: Tensor, groups: int) -> Tensor:
    """Return the numbers of groups for `groups` smaller ones."""
    return numbers.repeat_interleave(groups // numbers.shape[1], dim=1)


def _widened(value: Any) -> Any:
    return value.widen() if isinstance(value, CodedWeight) else value
