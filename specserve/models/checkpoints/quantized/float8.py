"""Find the FP8 matrices that GPUs can multiply by as a checkpoint has them, and read them.

That takes a config which says that activations are FP8, too, and scales of tensors or rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specserve.errors import UnsupportedModel
from specserve.models.checkpoints.quantized.blocks import Block, Format, owner_of
from specserve.models.checkpoints.quantized.scaled import CompressedTensors, Scaled
from specserve.models.checkpoints.tensors import StoredTensors
from specserve.models.float8_weight import FLOAT8, Float8Weight
from specserve.models.gpu.float8_kernels import MULTIPLE

STORED = "F8_E4M3"
"""The type of such matrices in a file's header."""
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class InputScheme:
    """How products with a checkpoint's FP8 matrices round their inputs.

    Each row by a scale of its own, or all by the one that the file has (`is_static`). Numbers
    beyond `largest` are cut off.
    """

    is_static: bool = False
    largest: float = math.inf


@dataclass(frozen=True, slots=True)
class StoredFloat8:
    """An FP8 matrix in a checkpoint's files."""

    stored: StoredTensors
    name: str
    layout: Scaled
    inputs: InputScheme | None

    @property
    def num_numbers(self) -> int:
        return math.prod(self.stored.shape(self.name))

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes where it is kept as it is, with its scales."""
        rows, columns = self.stored.shape(self.name)
        is_static = self.inputs is not None and self.inputs.is_static
        return rows * (columns + SCALE_BYTES) + SCALE_BYTES * is_static

    def refusal(self, ranks: int) -> str | None:
        """Return why it is widened where `ranks` share it; None if it is kept as it is."""
        if not self.layout.has_row_scales(self.stored, self.name):
            return "its scales are those of blocks or groups"
        if self.inputs is None:
            return "its config does not say that activations are rounded to FP8, too"
        if self.inputs.is_static and self._input_scale not in self.stored:
            return "it lacks the scales of activations that its config speaks of"
        shape = self.stored.shape(self.name)
        if len(shape) != 2 or any(size % (MULTIPLE * ranks) for size in shape):
            each = "" if ranks == 1 else f" on each of {ranks} ranks"
            return f"rows and columns are no multiples of {MULTIPLE}{each}"
        return None

    def read(
        self, *, dim: int = -2, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Float8Weight:
        """Return these ranges of rows (`dim` -2) or of columns (-1), joined; None: all of it."""
        assert self.inputs is not None, f"{self.name} is widened"
        whole = [slice(0, size) for size in self.stored.shape(self.name)]
        blocks: list[Block] = []
        for inside in [whole[dim]] if ranges is None else [slice(*one) for one in ranges]:
            rows, columns = (inside, whole[1]) if dim == -2 else (whole[0], inside)
            blocks.append(self.layout.read(self.stored, self.name, rows, columns))
        codes = torch.cat([block.codes.view(torch.uint8) for block in blocks], dim)
        scales = [block.scales.float()[:, :1] for block in blocks]  # columns share the rows' scales
        own = (
            self.stored.read(self._input_scale).float().amax().reshape(1, 1)
            if self.inputs.is_static
            else None
        )
        self.stored.mark_read((self.name, *self.layout.companions(self.name)))
        return Float8Weight(
            codes.contiguous().view(FLOAT8),
            torch.cat(scales) if dim == -2 else scales[0].contiguous(),
            own,
            self.inputs.largest,
        )

    @property
    def _input_scale(self) -> str:
        return f"{owner_of(self.name)}.input_scale"


@dataclass(frozen=True, slots=True)
class Float8Format:
    """How a checkpoint has FP8 matrices; `inputs` is None if products do not round their inputs."""

    layout: Scaled
    inputs: InputScheme | None

    @classmethod
    def from_config(cls, stated: Mapping[str, Any], layout: Format) -> Float8Format | None:
        """Return the format of a config's FP8 matrices; None if it can have none."""
        own = layout.scaled if isinstance(layout, CompressedTensors) else layout
        return cls(own, _stated_inputs(stated)) if isinstance(own, Scaled) else None

    def find(self, stored: StoredTensors, name: str) -> StoredFloat8 | None:
        """Return the matrix of that name if it is one in FP8."""
        if name not in stored or self.layout.shape(stored, name) is None:
            return None
        is_float8 = stored.dtype(name) == STORED
        return StoredFloat8(stored, name, self.layout, self.inputs) if is_float8 else None


def _stated_inputs(stated: Mapping[str, Any]) -> InputScheme | None:
    """Return how a quantization_config says that inputs are rounded; None: they keep their type."""
    method = stated.get("quant_method")
    if method == "fbgemm_fp8":
        largest = stated.get("activation_scale_ub")
        if largest is None:
            return InputScheme()
        if not isinstance(largest, int | float) or not 0 < largest < math.inf:
            raise UnsupportedModel(
                f"the activation_scale_ub {largest!r} of a quantization_config is no number above 0"
            )
        return InputScheme(largest=float(largest))
    if method == "fp8":
        return _SCHEMES.get(str(stated.get("activation_scheme")))
    schemes = {
        _inputs_of_group(group)
        for group in (stated.get("config_groups") or {}).values()
        if is_float8(group.get("weights"))
    }
    return schemes.pop() if len(schemes) == 1 else None


_SCHEMES: Mapping[str, InputScheme] = {
    "dynamic": InputScheme(),
    "static": InputScheme(is_static=True),
}


def _inputs_of_group(group: Mapping[str, Any]) -> InputScheme | None:
    """Return how a group of compressed-tensors rounds inputs: by rows where it does as it runs."""
    inputs = group.get("input_activations") or {}
    if not is_float8(inputs) or inputs.get("strategy") not in ("token", "tensor"):
        return None
    if inputs.get("dynamic") is True:
        return InputScheme()
    return InputScheme(is_static=True) if inputs["strategy"] == "tensor" else None


def is_float8(stated: Any) -> bool:
    return (
        isinstance(stated, Mapping)
        and (stated.get("type"), stated.get("num_bits")) == ("float", 8)
        and stated.get("symmetric") is not False
    )
