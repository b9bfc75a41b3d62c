"""Read tensors of a safetensors checkpoint, in parts, by the names that the library's modules use.

Knows no ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specserve.errors import ModelError

CONVERT = (
    "If you trust its maker, AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of "
    "transformers writes safetensors"
)

Range = tuple[int, int]  # first, and one past the last

RENAMES = (
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"^embed_out\."), "lm_head."),
)
"""Names in a file, and in the module."""
NORMS = re.compile(r"norm|ln_")
# A module holds all experts in one tensor, gate above up; a file mostly holds each matrix of each
# expert by itself.
EXPERT_MATRICES = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


class Weights:
    """The weights of a checkpoint, by the names of the module's parameters.

    No more than the requested ranges of a parameter is read.
    """

    def __init__(self, directory: Path, *, prefix: str) -> None:
        self.directory, self.prefix = directory, prefix
        # By the module's names: the open file, and the name in it.
        self._stored: dict[str, tuple[Any, str]] = {}
        for path in weight_files(directory):
            file = _open(path)
            names = file.keys()  # a file is no mapping
            self._stored.update({_rename(name): (file, name) for name in names})
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._find_tensor(name) is not None or bool(self._find_experts(name))

    def unread(self) -> set[str]:
        return set(self._stored) - self._read

    def read(self, name: str, *, dim: int = -2, ranges: Sequence[Range] | None = None) -> Tensor:
        """Return these ranges of a dimension, joined.

        `dim` counts from the end, so that it means the same for one expert as for all.
        """
        found = self._find_tensor(name)
        if found is not None:
            return self._read_joined((found,), dim, ranges)
        return torch.stack(
            [self._read_joined(matrices, dim, ranges) for matrices in self._find_experts(name)]
        )

    def _find_tensor(self, name: str) -> str | None:
        """Return the name of the tensor that is the parameter; None if there is none.

        Some checkpoints leave the base model's prefix out.
        """
        return next(
            (n for n in (name, name.removeprefix(f"{self.prefix}.")) if n in self._stored), None
        )

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
            found = list(takewhile(lambda names: all(n in self._stored for n in names), of_expert))
            if found:
                return found
        return []

    def _read_joined(
        self, names: Sequence[str], dim: int, ranges: Sequence[Range] | None
    ) -> Tensor:
        """Return matrices joined along `dim`, as far as they lie in the ranges."""
        assert len(names) == 1 or dim == -2, "several matrices are joined along their rows"
        self._read.update(names)
        if ranges is None:
            whole = [self._stored[name][0].get_tensor(self._stored[name][1]) for name in names]
            return whole[0] if len(whole) == 1 else torch.cat(whole, dim)
        pieces, start = [], 0
        for name in names:
            file, stored_name = self._stored[name]
            stored = file.get_slice(stored_name)
            length = stored.get_shape()[dim]
            for first, stop in ranges:
                inside = slice(max(first - start, 0), min(stop - start, length))
                if inside.start < inside.stop:
                    pieces.append(stored[..., inside, :] if dim == -2 else stored[..., inside])
            start += length
        return torch.cat(pieces, dim)


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: one, or those that its index names.

    Raises ModelError if it has none.
    """
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
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


@dataclass(frozen=True, slots=True)
class StoredSize:
    """How much a checkpoint's files hold, by their headers."""

    tensors: int
    numbers: int  # in all tensors

    @classmethod
    def of_files(cls, directory: Path) -> StoredSize:
        opened = (_open(path) for path in weight_files(directory))
        names = ((file, name) for file in opened for name in file.keys())  # noqa: SIM118
        sizes = [math.prod(file.get_slice(name).get_shape()) for file, name in names]
        return cls(len(sizes), sum(sizes))


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
        file = _open(path)
        for name in sorted(file.keys()):
            if NORMS.search(name) and len(file.get_slice(name).get_shape()) == 1:
                digest.update(name.encode() + file.get_tensor(name).float().numpy().tobytes())
    return digest.hexdigest()


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from error


def _rename(name: str) -> str:
    for old, new in RENAMES:
        name = old.sub(new, name)
    return name
