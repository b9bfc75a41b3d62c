"""The header of a GGUF file: metadata, and where tensors lie. Refuses what cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specserve.errors import ModelError, UnsupportedModel, first_line
from specserve.models.checkpoints.gguf.files import gguf_package
from specserve.models.checkpoints.gguf.tensors import Place

ARCHITECTURES = ("gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen3")
"""Those by llama.cpp's names that transformers converts, and whose texts are compared with its own.

Mistral and SmolLM are `llama`.
"""
SCALES = ("attention.scale", "embedding_scale", "logit_scale", "residual_scale")
"""Metadata that change the numbers of other architectures, and that nothing here reads."""


@dataclass(frozen=True, slots=True)
class Header:
    """The statements of a file about its model."""

    file: Path
    values: Mapping[str, Any]  # without the vocabulary
    tensors: Mapping[str, Place]  # by llama.cpp's names

    @classmethod
    def from_file(cls, file: Path) -> Header:
        """Read a header, and check that all tensors are there and of readable types.

        Raises ModelError or UnsupportedModel.
        """
        try:
            reader = gguf_package().GGUFReader(file)
            header = cls(file, _values(reader), _tensors(reader))
        except OSError as error:
            raise ModelError(f"{file} cannot be read: {error.strerror}") from error
        # The package checks little, so that a wrong byte may raise anything.
        except Exception as error:
            raise ModelError(
                f"{file} cannot be read as GGUF; it is damaged or cut short: {first_line(error)}"
            ) from error
        header._check(is_swapped=reader.byte_order != "I")
        return header

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value that is stated of this architecture."""
        return self.values.get(f"{self.architecture}.{name}", default)

    def _check(self, *, is_swapped: bool) -> None:
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{self.file} is of the architecture {self.architecture[:40]!r}, which cannot be "
                f"served from GGUF; {', '.join(ARCHITECTURES)} can"
            )
        if is_swapped:
            raise UnsupportedModel(f"{self.file} is big-endian, and only little-endian is read")
        if self.values.get("split.count", 0) > 1:
            raise UnsupportedModel(
                f"{self.file} is one of {self.values['split.count']} parts of a model; join them "
                "with llama.cpp's `llama-gguf-split --merge`"
            )
        if scale := next((name for name in SCALES if self.get(name)), None):
            raise UnsupportedModel(f"{self.file} states {scale}, which {self.architecture} has not")
        _check_kinds(self)


def _values(reader: Any) -> dict[str, Any]:
    """Return the metadata, without lists of texts, as the vocabulary is one."""
    text = gguf_package().GGUFValueType.STRING
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if len(field.types) == 1 or field.types[-1] != text
    }


def _tensors(reader: Any) -> dict[str, Place]:
    return {
        tensor.name: Place(
            tensor.tensor_type.name,
            tuple(int(size) for size in reversed(tensor.shape)),
            int(tensor.data_offset),
        )
        for tensor in reader.tensors
    }


def _check_kinds(header: Header) -> None:
    """Raise UnsupportedModel for a type of numbers that the package cannot widen."""
    package = gguf_package()
    for kind in sorted({tensor.kind for tensor in header.tensors.values()}):
        number = package.GGMLQuantizationType[kind]
        try:
            package.dequantize(np.zeros((1, package.GGML_QUANT_SIZES[number][1]), np.uint8), number)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{header.file} has numbers of the type {kind}, which the package gguf cannot widen"
            ) from error
