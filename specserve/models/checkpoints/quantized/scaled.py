"""Read 8-bit codes with scales, and all that the compressed-tensors library writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specserve.errors import UnsupportedModel
from specserve.models.checkpoints.quantized.blocks import (
    ALL,
    Block,
    as_matrix,
    as_scales,
    column_groups,
    covering,
    fp4,
    is_weight,
    owner_of,
    unpack,
)
from specserve.models.checkpoints.quantized.integers import PACKED_BITS
from specserve.models.checkpoints.tensors import StoredTensors


@dataclass(frozen=True, slots=True)
class Scaled:
    """Codes of 8 bits, integers or FP8, with a scale for all, a row, a group or a block.

    `fp8` (DeepSeek, Qwen) names the scales `weight_scale_inv`, and multiplies by them as well.
    """

    block_rows: int  # of scales of blocks; 0 if there are none
    block_columns: int

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Scaled:
        size = stated.get("weight_block_size") or _block_structure(stated) or (0, 0)
        try:
            rows, columns = map(int, size)
        except (TypeError, ValueError):
            raise UnsupportedModel(
                f"the weight_block_size {size!r} of a quantization_config is no pair of numbers"
            ) from None
        return cls(rows, columns)

    def shape(self, stored: StoredTensors, name: str) -> tuple[int, ...] | None:
        if not is_weight(name) or name not in stored or self._scale_name(stored, name) is None:
            return None
        return stored.shape(name)

    def read(self, stored: StoredTensors, name: str, rows: slice, columns: slice) -> Block:
        scale_name = self._scale_name(stored, name)
        assert scale_name is not None, f"{name} has no scales"
        scales = as_matrix(as_scales(stored.read(scale_name)))
        num_rows, num_columns = stored.shape(name)
        row_of, groups = self._places(scales, num_rows, num_columns, rows, columns)
        zero_name = f"{owner_of(name)}.weight_zero_point"
        zeros = as_matrix(stored.read(zero_name))[row_of] if zero_name in stored else None
        codes = stored.read(name, rows, columns)
        return Block(codes, scales[row_of], groups, zeros)

    def has_row_scales(self, stored: StoredTensors, name: str) -> bool:
        """Return whether a matrix has no zero points, and a scale for all of it or for its rows."""
        scale_name = self._scale_name(stored, name)
        if scale_name is None or f"{owner_of(name)}.weight_zero_point" in stored:
            return False
        shape, num_rows = stored.shape(scale_name), stored.shape(name)[0]
        if math.prod(shape) == 1:
            return True
        is_column = len(shape) == 1 or shape[1:] == (1,)
        # Fewer than there are rows are scales of joined parts, unless blocks are stated.
        return is_column and (shape[0] == num_rows or not (self.block_rows or num_rows % shape[0]))

    def _places(
        self, scales: Tensor, num_rows: int, num_columns: int, rows: slice, columns: slice
    ) -> tuple[Tensor, Tensor]:
        """Return the row and the column of the scale of each row and column."""
        row = torch.arange(rows.start, rows.stop)
        if scales.shape[0] == 1:
            row = torch.zeros_like(row)
        elif scales.shape[0] != num_rows:
            row = row // (self.block_rows or num_rows // scales.shape[0])
        is_block = self.block_columns and scales.shape[0] != num_rows
        size = self.block_columns if is_block else num_columns // scales.shape[1]
        return row, column_groups(columns, 0 if scales.shape[1] == 1 else size)

    def _scale_name(self, stored: StoredTensors, name: str) -> str | None:
        names = (f"{name}_scale", f"{name}_scale_inv")
        return next((scale for scale in names if scale in stored), None)

    def companions(self, name: str) -> tuple[str, ...]:
        leaves = ("scale", "scale_inv", "zero_point", "shape", "g_idx", "packed", "global_scale")
        activations = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale")
        return (
            *(f"{name}_{leaf}" for leaf in leaves),
            *(f"{owner_of(name)}.{leaf}" for leaf in activations),
        )


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Matrices of the compressed-tensors library: plain codes of 8 bits, or packed ones."""

    scaled: Scaled

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> CompressedTensors:
        layout = stated.get("format")
        if stated.get("sparsity_config", {}).get("format", "dense") != "dense":
            raise UnsupportedModel("checkpoints with sparse weights cannot be read")
        if "marlin" in str(layout):
            raise UnsupportedModel(f"compressed tensors in the layout {layout!r} cannot be read")
        return cls(Scaled.from_config(stated))

    def shape(self, stored: StoredTensors, name: str) -> tuple[int, ...] | None:
        packed = f"{name}_packed"
        if not is_weight(name) or packed not in stored:
            return self.scaled.shape(stored, name)
        if f"{name}_shape" in stored:
            rows, columns = stored.read(f"{name}_shape").tolist()
            return int(rows), int(columns)
        rows, packed_columns = stored.shape(packed)
        return rows, packed_columns * 2  # FP4, two codes a byte

    def read(self, stored: StoredTensors, name: str, rows: slice, columns: slice) -> Block:
        if f"{name}_packed" not in stored:
            return self.scaled.read(stored, name, rows, columns)
        if stored.dtype(f"{name}_packed") == "U8":
            return self._read_fp4(stored, name, rows, columns)
        shape = self.shape(stored, name)
        assert shape is not None, f"{name} is not stored as compressed tensors"
        return self._read_packed(stored, name, rows, columns, num_columns=shape[1])

    def _read_packed(
        self, stored: StoredTensors, name: str, rows: slice, columns: slice, *, num_columns: int
    ) -> Block:
        bits = 32 * stored.shape(f"{name}_packed")[1] // num_columns
        if bits not in PACKED_BITS:
            raise UnsupportedModel(f"{name} is packed in {bits} bits; 2, 4 and 8 can be read")
        packed, inside = covering(columns, 32 // bits)
        codes = unpack(stored.read(f"{name}_packed", rows, packed), bits)[:, inside]
        scales = as_matrix(stored.read(f"{name}_scale"))
        zeros: Tensor | None = torch.tensor([[2 ** (bits - 1)]]).expand(1, scales.shape[1])
        if f"{name}_zero_point" in stored:
            packed, inside = covering(rows, 32 // bits)
            stored_zeros = stored.read(f"{name}_zero_point", packed, ALL)
            zeros = unpack(stored_zeros.T, bits)[:, inside].T
        size = 0 if scales.shape[1] == 1 else num_columns // scales.shape[1]
        groups = column_groups(columns, size)
        if f"{name}_g_idx" in stored:
            groups = stored.read(f"{name}_g_idx", columns).long()
        return Block(codes, scales[rows] if scales.shape[0] > 1 else scales, groups, zeros)

    def _read_fp4(self, stored: StoredTensors, name: str, rows: slice, columns: slice) -> Block:
        packed, inside = covering(columns, 2)
        codes = fp4(stored.read(f"{name}_packed", rows, packed))[:, inside]
        scales = as_scales(stored.read(f"{name}_scale", rows, ALL))
        if f"{name}_global_scale" in stored:
            scales = scales / stored.read(f"{name}_global_scale").float()
        num_columns = stored.shape(f"{name}_packed")[1] * 2
        return Block(codes, scales, column_groups(columns, num_columns // scales.shape[1]))

    def companions(self, name: str) -> tuple[str, ...]:
        return self.scaled.companions(name)


def _block_structure(stated: Mapping[str, Any]) -> Any:
    """Return the rows and columns of a block, where compressed-tensors states them."""
    for group in (stated.get("config_groups") or {}).values():
        structure = (group.get("weights") or {}).get("block_structure")
        if structure is not None:
            return structure
    return None
