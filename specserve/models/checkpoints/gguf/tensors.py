"""Read the tensors of a GGUF file by the names that the library's modules use.

A file offers the methods of an open safetensors file, and no more is read than what is requested.
Quantised numbers are integers with scales, and minima, where the type has no more, and fp32
otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.errors import ModelError
from specserve.models.checkpoints.gguf.files import INDEX, gguf_package
from specserve.models.checkpoints.gguf.integers import GROUPS, WITH_MINIMA, split_blocks

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of numbers that are read as they are."""
ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor in the file, and how its numbers differ from the module's."""

    kind: str  # the type by ggml's name
    shape: tuple[int, ...]
    offset: int
    heads: int = 0  # whose rows interleave the halves that the library rotates; 0 for none
    added: float = 0.0  # to all numbers

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Place:
        return cls(**{**fields, "shape": tuple(fields["shape"])})

    @property
    def byte_shape(self) -> tuple[int, int]:
        """The rows, and the bytes of each; a vector's rows are its numbers."""
        rows, *columns = self.shape
        block, size = block_sizes(self.kind)
        return rows, (columns[0] if columns else 1) // block * size


class GgufFile:
    """The tensors of a file that `open_gguf` has opened, given the link to it.

    A matrix of integers with scales is two tensors, named as in GPTQ's files, or three with minima.
    """

    def __init__(self, path: Path) -> None:
        index = json.loads(path.with_name(INDEX).read_text(encoding="utf-8"))
        self._tensors: dict[str, tuple[Place, GgufPart]] = {}
        for name, fields in index.items():
            place = Place.from_json(fields)
            if place.kind not in GROUPS:
                self._tensors[name] = place, GgufPart.NUMBERS
                continue
            owner = name.removesuffix(".weight")
            self._tensors[f"{owner}.qweight"] = place, GgufPart.INTEGERS
            self._tensors[f"{owner}.scales"] = place, GgufPart.SCALES
            if place.kind in WITH_MINIMA:
                self._tensors[f"{owner}.minima"] = place, GgufPart.MINIMA
        try:
            self._data: NDArray[np.uint8] = np.memmap(path, mode="r")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path.resolve()} cannot be read: {error}") from error

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    @property
    def num_stored(self) -> int:
        """The number of tensors as the file counts them."""
        return sum(not part.is_of_groups for _, part in self._tensors.values())

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[()]

    def get_slice(self, name: str) -> GgufTensor:
        place, part = self._tensors[name]
        rows, size = place.byte_shape
        data = self._data[place.offset : place.offset + rows * size]
        return GgufTensor(place, part, data.reshape(rows, size))


class GgufPart(Enum):
    """The part of a stored tensor that is read."""

    NUMBERS = "numbers"
    INTEGERS = "integers"
    SCALES = "scales"
    MINIMA = "minima"

    @property
    def is_of_groups(self) -> bool:
        return self in (GgufPart.SCALES, GgufPart.MINIMA)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A vector or a matrix that is read when ranges of it are requested."""

    place: Place
    part: GgufPart
    data: NDArray[np.uint8]  # [rows, bytes of a row]

    def get_shape(self) -> tuple[int, ...]:
        if not self.part.is_of_groups:
            return self.place.shape
        rows, columns = self.place.shape
        return rows, columns // GROUPS[self.place.kind]

    def get_dtype(self) -> str:
        return self.place.kind if self.part is GgufPart.NUMBERS else self.part.value

    def __getitem__(self, ranges: Sequence[slice]) -> Tensor:
        """Return the part that lies in a range of each leading dimension."""
        rows, columns = (*ranges, ALL, ALL)[:2]
        is_vector = len(self.place.shape) == 1
        start, stop, _ = columns.indices(1 if is_vector else self.get_shape()[1])
        block, size = block_sizes(self.place.kind)
        if self.part.is_of_groups:
            block //= GROUPS[self.place.kind]
        first, last = start // block, -(-stop // block)
        stored = self.data[self._stored_rows(rows), first * size : last * size]
        part = self._decode(stored)[:, start - first * block : stop - first * block]
        if self.place.added:
            part = part.float() - self.place.added
        return part.flatten() if is_vector else part.contiguous()

    def _stored_rows(self, rows: slice) -> slice | NDArray[np.intp]:
        """Return where rows lie. Heads are stored with the two halves of each interleaved."""
        if not self.place.heads:
            return rows
        order = np.arange(len(self.data)).reshape(self.place.heads, -1, 2)
        return order.swapaxes(1, 2).ravel()[rows]

    def _decode(self, data: NDArray[np.uint8]) -> Tensor:  # [rows, bytes] to [rows, columns]
        kind = self.place.kind
        if kind in PLAIN:
            return torch.from_numpy(np.array(data)).view(PLAIN[kind])
        if self.part is not GgufPart.NUMBERS:
            blocks = data.reshape(-1, block_sizes(kind)[1])
            parts = (GgufPart.INTEGERS, GgufPart.SCALES, GgufPart.MINIMA)
            found = split_blocks(blocks, kind)[parts.index(self.part)]
            return found.view(len(data), -1)
        package = gguf_package()
        number = package.GGMLQuantizationType[kind]
        return torch.from_numpy(package.dequantize(np.ascontiguousarray(data), number))


def block_sizes(kind: str) -> tuple[int, int]:
    """Return the numbers and the bytes of a block."""
    package = gguf_package()
    sizes: tuple[int, int] = package.GGML_QUANT_SIZES[package.GGMLQuantizationType[kind]]
    return sizes
