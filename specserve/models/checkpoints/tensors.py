"""Find and read the tensors of a checkpoint's files by name. Knows no models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specserve.errors import ModelError
from specserve.models.checkpoints.gguf.files import SUFFIX
from specserve.models.checkpoints.gguf.tensors import GgufFile

RENAMES = (
    # Of GraniteMoe.
    (re.compile(r"(\.block_sparse_moe)\.input_linear\.weight$"), r"\1.experts.gate_up_proj"),
    (re.compile(r"(\.block_sparse_moe)\.output_linear\.weight$"), r"\1.experts.down_proj"),
    (re.compile(r"(\.block_sparse_moe\.router)\.layer\.weight$"), r"\1.weight"),
    # Of others.
    (re.compile(r"\.block_sparse_moe\.(?!experts\.[a-z]|router\.)"), ".mlp."),
    (re.compile(r"^embed_out\."), "lm_head."),
)
"""Names in a file, and in the module."""


class StoredTensors:
    """The tensors of open files, by the names that the library's modules use.

    Those that `module_name` has no name for are left out.
    """

    def __init__(
        self, paths: Iterable[Path], module_name: Callable[[str], str | None] | None = None
    ) -> None:
        module_name = module_name or rename
        self._files: dict[str, tuple[Any, str]] = {}  # the open file, and the name in it
        for path in paths:
            file = open_file(path)
            names = file.keys()  # a file is no mapping
            for name in names:
                renamed = module_name(name)
                if renamed is not None:
                    self._files[renamed] = (file, name)
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def unread(self) -> set[str]:
        return set(self._files) - self._read

    def mark_read(self, names: Iterable[str]) -> None:
        """Take tensors for read that a format needs no more, such as a matrix's shape."""
        self._read.update(names)

    def shape(self, name: str) -> tuple[int, ...]:
        file, stored_name = self._files[name]
        return tuple(file.get_slice(stored_name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the type of a tensor as the file's header has it: `F8_E4M3`, `I32`, `BF16`."""
        file, stored_name = self._files[name]
        return str(file.get_slice(stored_name).get_dtype())

    def read(self, name: str, *ranges: slice) -> Tensor:
        """Return a tensor, or the part that lies in a range of each leading dimension."""
        self._read.add(name)
        file, stored_name = self._files[name]
        if not ranges:
            whole: Tensor = file.get_tensor(stored_name)
            return whole
        part: Tensor = file.get_slice(stored_name)[ranges]
        return part


def open_file(path: Path) -> Any:
    """Open a safetensors file, or what has its methods. Raises ModelError."""
    if path.suffix == SUFFIX:
        return GgufFile(path)
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from error


def rename(name: str) -> str:
    for old, new in RENAMES:
        name = old.sub(new, name)
    return name
