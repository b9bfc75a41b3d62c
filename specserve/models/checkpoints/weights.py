"""Read tensors of a checkpoint, in parts, by the names that the library's modules use.

Knows no ranks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import count, takewhile
from pathlib import Path

import torch
from torch import Tensor

from specserve.errors import ModelError
from specserve.models.checkpoints.gguf.files import INDEX, WEIGHTS
from specserve.models.checkpoints.quantized.float8 import StoredFloat8
from specserve.models.checkpoints.quantized.formats import (
    num_numbers,
    num_saved_bytes,
    read_float8,
    read_format,
)
from specserve.models.checkpoints.tensors import StoredTensors, open_file
from specserve.models.checkpoints.text_part import (
    TRANSPOSED_EXPERTS,
    decoder_name,
    is_multimodal,
    model_type,
)

CONVERT = (
    "If you trust its maker, AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of "
    "transformers writes safetensors"
)

EMBEDDING = "model.embed_tokens.weight"
Range = tuple[int, int]  # first, and one past the last

NORMS = re.compile(r"norm|ln_")
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point")
# A module holds all experts in one tensor, gate above up; a file mostly holds each matrix of each
# expert by itself.
EXPERT_MATRICES = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


class Codes(Enum):
    """Small numbers of a quantised checkpoint that linear layers compute with as they are."""

    INTEGERS = "integers"  # on CPUs, by kernels of ours
    FLOAT8 = "float8"  # on GPUs


class Weights:
    """The weights of a checkpoint, by the names of the module's parameters.

    No more than the requested ranges of a parameter is read.
    """

    def __init__(self, directory: Path, *, prefix: str, dtype: torch.dtype = torch.float32) -> None:
        self.directory, self.prefix = directory, prefix
        self.dtype = dtype  # that quantised matrices are widened to
        self._stored = stored_tensors(directory)
        self._format, self._float8 = read_format(directory), read_float8(directory)
        self._keeps_codes = False
        self._may_transpose = model_type(directory) in TRANSPOSED_EXPERTS

    def __contains__(self, name: str) -> bool:
        return self._find_tensor(name) is not None or bool(self._find_experts(name))

    def is_quantized(self, name: str) -> bool:
        return self._quantized_shape(name) is not None

    def unread(self) -> set[str]:
        return {name for name in self._stored.unread() if not self._is_ignored(name)}

    def _is_ignored(self, name: str) -> bool:
        """Return whether a tensor scales a KV cache of 8 bits, which a plain one has no use for."""
        return self._format is not None and name.endswith(CACHE_SCALES)

    def read(self, name: str, *, dim: int = -2, ranges: Sequence[Range] | None = None) -> Tensor:
        """Return these ranges of a dimension, joined.

        `dim` counts from the end, so that it means the same for one expert as for all.
        """
        found = self._find_tensor(name)
        if found is not None and self._is_transposed(found):
            other = -1 if dim == -2 else -2
            return self._read_joined((found,), other, ranges).transpose(-2, -1).contiguous()
        if found is not None:
            return self._read_joined((found,), dim, ranges)
        return torch.stack(
            [self._read_joined(matrices, dim, ranges) for matrices in self._find_experts(name)]
        )

    def float8(self, name: str) -> StoredFloat8 | None:
        """Return a parameter that is stored in FP8; None if it is not."""
        found = self._find_tensor(name)
        if self._float8 is None or found is None:
            return None
        return self._float8.find(self._stored, found)

    @contextmanager
    def keeping_codes(self) -> Iterator[None]:
        """Read quantised matrices as small integers meanwhile, where they are such."""
        self._keeps_codes = True
        try:
            yield
        finally:
            self._keeps_codes = False

    def _is_transposed(self, name: str) -> bool:
        """Return whether a tensor has the matrices of all experts with columns for rows.

        Released files do, and those that later versions of the library write do not.
        """
        leaf = name.rpartition("experts.")[2]
        if not self._may_transpose or leaf not in EXPERT_MATRICES:
            return False
        width = self._stored.shape(EMBEDDING)[-1]
        return self._stored.shape(name)[-1 if leaf == "gate_up_proj" else -2] != width

    def _find_tensor(self, name: str) -> str | None:
        """Return the name of the tensor that is the parameter; None if there is none.

        Some checkpoints leave the base model's prefix out.
        """
        names = (name, name.removeprefix(f"{self.prefix}."))
        return next((n for n in names if self._is_stored(n)), None)

    def _is_stored(self, name: str) -> bool:
        return name in self._stored or self._quantized_shape(name) is not None

    def _quantized_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the plain shape of a matrix that is stored quantised; None if it is not."""
        return None if self._format is None else self._format.shape(self._stored, name)

    def _find_experts(self, name: str) -> list[tuple[str, ...]]:
        """Return for each expert the names of the matrices that make up its part of the parameter.

        Returns an empty list if the parameter is not stored by experts.
        """
        owner, _, leaf = name.rpartition(".")
        for matrices in EXPERT_MATRICES.get(leaf, ()):
            of_expert = (
                tuple(f"{owner}.{expert}.{matrix}.weight" for matrix in matrices)
                for expert in count()
            )
            found = list(takewhile(lambda names: all(map(self._is_stored, names)), of_expert))
            if found:
                return found
        return []

    def _read_joined(
        self, names: Sequence[str], dim: int, ranges: Sequence[Range] | None
    ) -> Tensor:
        """Return matrices joined along `dim`, as far as they lie in the ranges."""
        assert len(names) == 1 or dim == -2, "several matrices are joined along their rows"
        if ranges is None:
            whole = [self._read_whole(name) for name in names]
            return whole[0] if len(whole) == 1 else torch.cat(whole, dim)
        pieces, start = [], 0
        for name in names:
            length = (self._quantized_shape(name) or self._stored.shape(name))[dim]
            for first, stop in ranges:
                inside = slice(max(first - start, 0), min(stop - start, length))
                if inside.start < inside.stop:
                    pieces.append(self._read_range(name, dim, inside))
            start += length
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def _read_whole(self, name: str) -> Tensor:
        shape = self._quantized_shape(name)
        if shape is None:
            return self._stored.read(name)
        return self._read_quantized(name, slice(0, shape[-2]), slice(0, shape[-1]))

    def _read_range(self, name: str, dim: int, inside: slice) -> Tensor:
        shape = self._quantized_shape(name)
        if shape is None:
            dims = len(self._stored.shape(name))
            leading = (slice(None),) * (dims + dim)
            return self._stored.read(name, *leading, inside)
        if dim == -2:
            return self._read_quantized(name, inside, slice(0, shape[-1]))
        return self._read_quantized(name, slice(0, shape[-2]), inside)

    def _read_quantized(self, name: str, rows: slice, columns: slice) -> Tensor:
        assert self._format is not None, f"{name} is not quantised"
        block = self._format.read(self._stored, name, rows, columns)
        self._stored.mark_read((name, *self._format.companions(name)))
        coded = block.coded() if self._keeps_codes else None
        return block.widen().to(self.dtype) if coded is None else coded


def weight_files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint: one, or those that its index names.

    Raises ModelError if it has none.
    """
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if (directory / INDEX).is_file():
        return [directory / WEIGHTS]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [directory / name for name in names]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is no index of a checkpoint's files") from error
        for name in names:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ModelError(f"{index} names {name}, outside the checkpoint's folder")
        return files
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        raise ModelError(
            f"{directory} holds pickled weights only; specserve reads safetensors only, because "
            f"a pickle may run code. {CONVERT}"
        )
    raise ModelError(
        f"{directory} holds no weights: neither model.safetensors nor "
        "model.safetensors.index.json (pickles are never fetched)"
    )


def stored_tensors(directory: Path) -> StoredTensors:
    """Return the tensors of a checkpoint, of a multimodal one its text model's."""
    module_name = decoder_name if is_multimodal(directory) else None
    return StoredTensors(weight_files(directory), module_name)


@dataclass(frozen=True, slots=True)
class StoredSize:
    """How much a checkpoint's files hold, once it is widened."""

    tensors: int
    numbers: int  # in all tensors

    @classmethod
    def of_files(cls, directory: Path) -> StoredSize:
        stored = stored_tensors(directory)
        return cls(*num_numbers(stored, read_format(directory)))


def num_weight_bytes(directory: Path, dtype: torch.dtype, *, keeps_codes: bool = False) -> int:
    """Return the bytes of a checkpoint's weights in memory.

    Quantised matrices are widened, unless kernels read their small integers.
    """
    stored, layout = StoredTensors(weight_files(directory)), read_format(directory)
    widened = num_numbers(stored, layout)[1] * dtype.itemsize
    return widened - (num_saved_bytes(stored, layout, dtype) if keeps_codes else 0)


def num_stored_parameters(directory: Path) -> int:
    """Return how many numbers all tensors have."""
    return StoredSize.of_files(directory).numbers


def fingerprint(directory: Path) -> str:
    """Return a hash that identifies the model of a checkpoint.

    It is taken of the norms, which are small and change with any training. A widened copy has the
    same hash.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in weight_files(directory):
        file = open_file(path)
        for name in sorted(file.keys()):
            if NORMS.search(name) and len(file.get_slice(name).get_shape()) == 1:
                digest.update(name.encode() + file.get_tensor(name).float().numpy().tobytes())
    return digest.hexdigest()
