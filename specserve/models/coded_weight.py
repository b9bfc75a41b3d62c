"""Weights kept as small integers with scales, which stand for bf16 matrices.

Knows neither files nor kernels. A kernel that has no use for the integers gets the matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

ZERO_CODE = 8
"""What is stored of a zero in 4 bits, which have no sign."""
RANGES: Mapping[int, tuple[int, int]] = {8: (-128, 127), 4: (-8, 7)}
"""Smallest and largest integer of that many bits."""


class CodedWeight(Tensor):
    """A matrix [out, in] of bf16 numbers, as integers of 8 or 4 bits with scales by groups.

    Rows of several are joined, and the whole is detached, as integers. Any other operation of torch
    sees the widened matrix.
    """

    codes: Tensor  # int8 [out, in]; of 4 bits, uint8 [out, in / 2], lower half first
    scales: Tensor  # fp32 [out, groups]
    bits: int

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, bits: int) -> CodedWeight:
        outputs, width = codes.shape
        made: CodedWeight = Tensor._make_wrapper_subclass(
            cls, (outputs, width * 8 // bits), dtype=torch.bfloat16, device=codes.device
        )
        made.codes, made.scales, made.bits = codes, scales, bits
        return made

    @classmethod
    def from_integers(cls, integers: Tensor, scales: Tensor) -> CodedWeight:
        """Return a weight of int8 integers [out, in], in 4 bits if all of them fit."""
        low, high = RANGES[4]
        is_small = int(integers.min()) >= low and int(integers.max()) <= high
        if not is_small or integers.shape[1] % 2:
            return cls(integers, scales.float(), 8)
        halves = (integers + ZERO_CODE).view(torch.uint8).view(len(integers), -1, 2)
        return cls(halves[..., 0] | halves[..., 1] << 4, scales.float(), 4)

    def __init__(self, codes: Tensor, scales: Tensor, bits: int) -> None:
        super().__init__()

    @property
    def integers(self) -> Tensor:
        """The integers, int8 [out, in]."""
        if self.bits == 8:
            return self.codes
        halves = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1)
        return halves.view(torch.int8) - ZERO_CODE

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def widen(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the matrix as plain numbers."""
        groups = self.scales.shape[1]
        by_groups = self.integers.view(len(self), groups, -1).float()
        numbers: Tensor = by_groups * self.scales.unsqueeze(-1)
        return numbers.flatten(1).to(dtype)

    def detach(self) -> CodedWeight:
        # Not left to torch, which fails to detach what was made outside of its inference mode.
        return CodedWeight(self.codes, self.scales, self.bits)

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
    """Return weights below one another; None if not all have integers and groups alike."""
    coded = [part for part in parts if isinstance(part, CodedWeight)]
    if len(coded) < len(parts) or len({part.scales.shape[1] for part in coded}) > 1:
        return None
    coded = of_one_width(coded)
    codes = torch.cat([part.codes for part in coded])
    return CodedWeight(codes, torch.cat([part.scales for part in coded]), coded[0].bits)


def of_one_width(weights: Sequence[CodedWeight]) -> list[CodedWeight]:
    """Return weights in as many bits as the widest of them has."""
    if len({weight.bits for weight in weights}) == 1:
        return list(weights)
    return [CodedWeight(weight.integers, weight.scales, 8) for weight in weights]


def _widened(value: Any) -> Any:
    return value.widen() if isinstance(value, CodedWeight) else value
