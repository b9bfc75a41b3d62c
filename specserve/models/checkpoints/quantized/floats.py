"""Read MXFP4 (gpt-oss) and what bitsandbytes writes: codes that name entries of a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specserve.models.checkpoints.quantized.blocks import (
    ALL,
    Block,
    as_scales,
    block_of,
    column_groups,
    covering,
    fp4,
    is_weight,
    owner_of,
)
from specserve.models.checkpoints.tensors import StoredTensors


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """The experts of gpt-oss: FP4 in groups of 32 columns, transposed in the module."""

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Mxfp4:
        return cls()

    def shape(self, stored: StoredTensors, name: str) -> tuple[int, ...] | None:
        if f"{name}_blocks" not in stored:
            return None
        experts, columns, groups, half = stored.shape(f"{name}_blocks")
        return experts, groups * half * 2, columns

    def read(self, stored: StoredTensors, name: str, rows: slice, columns: slice) -> Block:
        blocks = stored.read(f"{name}_blocks", ALL, columns)  # [experts, columns, groups, 16]
        scales = as_scales(stored.read(f"{name}_scales", ALL, columns))
        numbers = (fp4(blocks) * scales.unsqueeze(-1)).flatten(2)
        return block_of(numbers[..., rows].transpose(1, 2).contiguous())

    def companions(self, name: str) -> tuple[str, ...]:
        return f"{name}_blocks", f"{name}_scales"


@dataclass(frozen=True, slots=True)
class Bitsandbytes:
    """Codes of 4 bits in runs of the flat matrix (NF4, FP4), or INT8 with a scale a row."""

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Bitsandbytes:
        return cls()

    def shape(self, stored: StoredTensors, name: str) -> tuple[int, ...] | None:
        if is_weight(name) and f"{owner_of(name)}.SCB" in stored:
            return stored.shape(name)
        state = self._state(stored, name)
        return None if state is None else tuple(state["shape"])

    def read(self, stored: StoredTensors, name: str, rows: slice, columns: slice) -> Block:
        if f"{owner_of(name)}.SCB" in stored:
            scales = stored.read(f"{owner_of(name)}.SCB", rows).float()[:, None] / 127
            codes = stored.read(name, rows, columns)
            return Block(codes, scales, column_groups(columns, 0))
        state = self._state(stored, name)
        assert state is not None, f"{name} has no quant_state"
        width = state["shape"][1]
        first, stop = rows.start * width, rows.stop * width
        packed, inside = covering(slice(first, stop), 2)
        codes = stored.read(name, packed).flatten()
        codes = torch.stack((codes >> 4, codes & 15), 1).flatten()[inside]
        runs = torch.arange(first, stop) // state["blocksize"]
        values = stored.read(f"{name}.quant_map").float()[codes.long()]
        numbers = (values * self._largest(stored, name, state)[runs]).view(-1, width)
        return block_of(numbers[:, columns])

    def _largest(self, stored: StoredTensors, name: str, state: Mapping[str, Any]) -> Tensor:
        """Return the scale of each run, which may be quantised itself."""
        largest = stored.read(f"{name}.absmax")
        if f"{name}.nested_absmax" not in stored:
            return largest.float()
        nested = stored.read(f"{name}.nested_absmax").float()
        values = stored.read(f"{name}.nested_quant_map").float()[largest.long()]
        runs = torch.arange(len(largest)) // state["nested_blocksize"]
        scales: Tensor = values * nested[runs]
        return scales + float(state["nested_offset"])

    def _state(self, stored: StoredTensors, name: str) -> dict[str, Any] | None:
        for kind in ("nf4", "fp4"):
            if (state := f"{name}.quant_state.bitsandbytes__{kind}") in stored:
                text: dict[str, Any] = json.loads(bytes(stored.read(state).tolist()))
                return text
        return None

    def companions(self, name: str) -> tuple[str, ...]:
        leaves = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
        return (
            *(f"{name}.{leaf}" for leaf in leaves),
            *(f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")),
            f"{owner_of(name)}.SCB",
            f"{owner_of(name)}.weight_format",
        )
