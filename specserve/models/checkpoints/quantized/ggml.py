"""Read the matrices of GGUF files that are integers with scales, and minima, by groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specserve.models.checkpoints.quantized.blocks import Block, column_groups, is_weight, owner_of
from specserve.models.checkpoints.tensors import StoredTensors


@dataclass(frozen=True, slots=True)
class Ggml:
    """Integers of up to 8 bits; every matrix has a type, and so a size of groups, of its own."""

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Ggml:
        return cls()

    def shape(self, stored: StoredTensors, name: str) -> tuple[int, ...] | None:
        codes = f"{owner_of(name)}.qweight"
        return stored.shape(codes) if is_weight(name) and codes in stored else None

    def read(self, stored: StoredTensors, name: str, rows: slice, columns: slice) -> Block:
        codes, scales, minima = self.companions(name)
        size = stored.shape(codes)[1] // stored.shape(scales)[1]
        return Block(
            stored.read(codes, rows, columns),
            stored.read(scales, rows),
            column_groups(columns, size),
            minima=stored.read(minima, rows) if minima in stored else None,
        )

    def companions(self, name: str) -> tuple[str, ...]:
        return tuple(f"{owner_of(name)}.{leaf}" for leaf in ("qweight", "scales", "minima"))
