"""The tensors of a safetensors checkpoint, by the names that the library's modules give them, read in parts. Knows no ranks."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specserve.errors import ModelError

CONVERT = "If you trust its maker, AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of transformers writes safetensors"

Range = tuple[int, int]  # first, and one past the last

RENAMED = (
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"^embed_out\."), "lm_head."),
)  # in the file, in the module
NORMS = re.compile(r"norm|ln_")
# A module holds all experts in one tensor, gate above up; a file mostly holds each matrix of each expert by itself.
EXPERT_MATRICES = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


class Weights:
    """Finds a parameter by its name in the module, and reads no more than the asked ranges of it."""

    def __init__(self, directory: Path, *, prefix: str) -> None:
        self.directory, self.prefix = directory, prefix
        self._places: dict[
            str, tuple[Any, str]
        ] = {}  # by the module's names: the open file, and the name in it
        for path in files(directory):
            file = _opened(path)
            self._places.update({_renamed(name): (file, name) for name in file.keys()})  # noqa: SIM118 (a file is no mapping)
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._alone(name) is not None or bool(self._experts(name))

    def unread(self) -> set[str]:
        return set(self._places) - self._read

    def read(self, name: str, *, dim: int = -2, ranges: Sequence[Range] | None = None) -> Tensor:
        """These ranges of `dim`, joined. `dim` counts from the end, so that it means the same for one expert as for all."""
        alone = self._alone(name)
        if alone is not None:
            return self._joined((alone,), dim, ranges)
        return torch.stack(
            [self._joined(matrices, dim, ranges) for matrices in self._experts(name)]
        )

    def _alone(self, name: str) -> str | None:
        """The name under which the parameter lies in the checkpoint as it is; some leave the base model's prefix out."""
        return next(
            (n for n in (name, name.removeprefix(f"{self.prefix}.")) if n in self._places), None
        )

    def _experts(self, name: str) -> list[tuple[str, ...]]:
        """For each expert the names of the matrices that make up its part of the parameter; empty if there are none."""
        owner, _, leaf = name.rpartition(".")
        for matrices in EXPERT_MATRICES.get(leaf, ()):
            of_expert = (
                tuple(f"{owner}.{expert}.{matrix}.weight" for matrix in matrices)
                for expert in count()
            )
            found = list(takewhile(lambda names: all(n in self._places for n in names), of_expert))
            if found:
                return found
        return []

    def _joined(self, names: Sequence[str], dim: int, ranges: Sequence[Range] | None) -> Tensor:
        """Matrices on top of one another, as far as they lie in the ranges."""
        assert len(names) == 1 or dim == -2, "several matrices are joined along their rows"
        self._read.update(names)
        if ranges is None:
            whole = [self._places[name][0].get_tensor(self._places[name][1]) for name in names]
            return whole[0] if len(whole) == 1 else torch.cat(whole, dim)
        pieces, start = [], 0
        for name in names:
            file, stored_name = self._places[name]
            stored = file.get_slice(stored_name)
            length = stored.get_shape()[dim]
            for first, stop in ranges:
                inside = slice(max(first - start, 0), min(stop - start, length))
                if inside.start < inside.stop:
                    pieces.append(stored[..., inside, :] if dim == -2 else stored[..., inside])
            start += length
        return torch.cat(pieces, dim)


def files(directory: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint: one, or those that its index names."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            return [
                directory / name
                for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is no index of a checkpoint's files") from error
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        raise ModelError(
            f"{directory} holds pickled weights only; specserve reads safetensors only, because a pickle may run code. {CONVERT}"
        )
    raise ModelError(
        f"{directory} holds no weights: neither model.safetensors nor model.safetensors.index.json (pickles are never fetched)"
    )


def num_stored(directory: Path) -> int:
    """Numbers in all tensors, by the files' headers."""
    opened = (_opened(path) for path in files(directory))
    names = ((file, name) for file in opened for name in file.keys())  # noqa: SIM118
    return sum(math.prod(file.get_slice(name).get_shape()) for file, name in names)


def fingerprint(directory: Path) -> str:
    """Of the model that a checkpoint holds: of its norms, which are small, and change with any training. A widened copy has the same."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files(directory):
        file = _opened(path)
        for name in sorted(file.keys()):
            if NORMS.search(name) and len(file.get_slice(name).get_shape()) == 1:
                digest.update(name.encode() + file.get_tensor(name).float().numpy().tobytes())
    return digest.hexdigest()


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from error


def _renamed(name: str) -> str:
    for old, new in RENAMED:
        name = old.sub(new, name)
    return name
