"""Read GPTQ's and AWQ's matrices: small integers packed in larger ones, scaled by groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specserve.errors import UnsupportedModel
from specserve.models.checkpoints.quantized.blocks import (
    ALL,
    Block,
    column_groups,
    covering,
    is_weight,
    owner_of,
    unpack,
)
from specserve.models.checkpoints.tensors import StoredTensors

PACKED_BITS = (2, 4, 8)
"""Widths that fill 32 bits without a rest."""
AWQ_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the 4 bits of eight neighbouring columns lie in an integer of AWQ's GEMM layout."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """Codes packed along the columns, in groups of columns that may be in any order."""

    bits: int
    group_size: int
    zero_shift: int  # the first version of the format stores zero points less one

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Gptq:
        bits = _stated_bits(stated, PACKED_BITS)
        version = stated.get("checkpoint_format", "gptq")
        if version not in ("gptq", "gptq_v2"):
            raise UnsupportedModel(
                f"GPTQ's layout {version!r} cannot be read; gptq and gptq_v2 can"
            )
        return cls(bits, _group_size(stated), int(version == "gptq"))

    def shape(self, stored: StoredTensors, name: str) -> tuple[int, ...] | None:
        codes = f"{owner_of(name)}.qweight"
        if not is_weight(name) or codes not in stored:
            return None
        packed, rows = stored.shape(codes)
        return rows, packed * (32 // self.bits)

    def read(self, stored: StoredTensors, name: str, rows: slice, columns: slice) -> Block:
        owner, per = owner_of(name), 32 // self.bits
        packed, inside = covering(columns, per)
        codes = unpack(stored.read(f"{owner}.qweight", packed, rows).T, self.bits)[:, inside]
        packed, inside = covering(rows, per)
        zeros = unpack(stored.read(f"{owner}.qzeros", ALL, packed), self.bits)[:, inside].T
        zeros = (zeros + self.zero_shift) & (2**self.bits - 1)
        scales = stored.read(f"{owner}.scales", ALL, rows).T
        groups = column_groups(columns, self.group_size)
        if f"{owner}.g_idx" in stored:
            groups = stored.read(f"{owner}.g_idx", columns).long()
        return Block(codes, scales, groups, zeros)

    def companions(self, name: str) -> tuple[str, ...]:
        return tuple(
            f"{owner_of(name)}.{leaf}" for leaf in ("qweight", "qzeros", "scales", "g_idx")
        )


@dataclass(frozen=True, slots=True)
class Awq:
    """Codes of 4 bits, packed along the rows in an order of their own."""

    group_size: int

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Awq:
        _stated_bits(stated, (4,))
        if (version := str(stated.get("version", "gemm")).lower()) != "gemm":
            raise UnsupportedModel(f"AWQ's layout {version!r} cannot be read; gemm can")
        return cls(_group_size(stated))

    def shape(self, stored: StoredTensors, name: str) -> tuple[int, ...] | None:
        codes = f"{owner_of(name)}.qweight"
        if not is_weight(name) or codes not in stored:
            return None
        columns, packed = stored.shape(codes)
        return packed * 8, columns

    def read(self, stored: StoredTensors, name: str, rows: slice, columns: slice) -> Block:
        owner = owner_of(name)
        packed, inside = covering(rows, 8)
        codes = _awq_unpack(stored.read(f"{owner}.qweight", columns, packed))[:, inside].T
        zeros = _awq_unpack(stored.read(f"{owner}.qzeros", ALL, packed))[:, inside].T
        scales = stored.read(f"{owner}.scales", ALL, rows).T
        groups = column_groups(columns, self.group_size)
        return Block(codes, scales, groups, zeros)

    def companions(self, name: str) -> tuple[str, ...]:
        return tuple(f"{owner_of(name)}.{leaf}" for leaf in ("qweight", "qzeros", "scales"))


def _stated_bits(stated: Mapping[str, Any], known: tuple[int, ...]) -> int:
    bits = stated.get("bits", stated.get("w_bit", 4))
    if bits not in known:
        raise UnsupportedModel(
            f"{stated['quant_method']} in {bits!r} bits cannot be read; "
            f"{', '.join(map(str, known))} can"
        )
    return int(bits)


def _group_size(stated: Mapping[str, Any]) -> int:
    size = stated.get("group_size", stated.get("q_group_size", 128))
    if not isinstance(size, int):
        raise UnsupportedModel(f"the group_size {size!r} of a quantization_config is no number")
    return size


def _awq_unpack(packed: Tensor) -> Tensor:
    codes = unpack(packed, 4)
    return codes.view(*codes.shape[:-1], -1, 8)[..., AWQ_POSITIONS].flatten(-2)
