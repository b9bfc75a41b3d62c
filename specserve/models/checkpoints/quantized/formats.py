"""Find the format of a checkpoint's quantised matrices."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from specserve.errors import UnsupportedModel
from specserve.models.checkpoints.quantized.blocks import Format
from specserve.models.checkpoints.quantized.float8 import Float8Format
from specserve.models.checkpoints.quantized.floats import Bitsandbytes, Mxfp4
from specserve.models.checkpoints.quantized.ggml import Ggml
from specserve.models.checkpoints.quantized.integers import Awq, Gptq
from specserve.models.checkpoints.quantized.scaled import CompressedTensors, Scaled
from specserve.models.checkpoints.tensors import StoredTensors

SAMPLE_ROWS = 8
FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = {
    "compressed-tensors": CompressedTensors.from_config,
    "fp8": Scaled.from_config,
    "fbgemm_fp8": Scaled.from_config,
    "gptq": Gptq.from_config,
    "awq": Awq.from_config,
    "bitsandbytes": Bitsandbytes.from_config,
    "mxfp4": Mxfp4.from_config,
    "gguf": Ggml.from_config,
}
"""By the name that a checkpoint's quantization_config has as quant_method."""


def read_format(directory: Path) -> Format | None:
    """Return the format of a checkpoint's quantised matrices; None if it has none.

    Raises UnsupportedModel for formats that cannot be read.
    """
    try:
        stated = json.loads((directory / "config.json").read_text()).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return None  # the config's reader reports it
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise UnsupportedModel(f"{directory} has a quantization_config that is no object")
    method = stated.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise UnsupportedModel(
            f"{directory} is quantized by {str(method)[:40]!r}, which specserve cannot read; "
            f"it reads {', '.join(FORMATS)}, and bf16, fp16 or fp32"
        )
    return FORMATS[method](stated)


def read_float8(directory: Path) -> Float8Format | None:
    """Return the format of a checkpoint's FP8 matrices; None if it can have none."""
    layout = read_format(directory)
    return None if layout is None else Float8Format.from_config(stated_config(directory), layout)


def multiplies_float8(directory: Path) -> bool:
    """Return whether a checkpoint's config says that products are of FP8 numbers."""
    found = read_float8(directory)
    return found is not None and found.inputs is not None


def method_of(directory: Path) -> str:
    """Return the name of the method by which a checkpoint was quantised."""
    return str(stated_config(directory)["quant_method"])


def stated_config(directory: Path) -> dict[str, Any]:
    """Return the quantization_config of a checkpoint that has one."""
    stated: dict[str, Any] = json.loads((directory / "config.json").read_text())
    config: dict[str, Any] = stated["quantization_config"]
    return config


def num_numbers(stored: StoredTensors, layout: Format | None) -> tuple[int, int]:
    """Return how many matrices and how many numbers a checkpoint has, as widened."""
    plain = set(stored.names())
    sizes: list[int] = []
    if layout is not None:
        for name, shape in _matrices(stored, layout).items():
            sizes.append(math.prod(shape))
            plain -= {name, *layout.companions(name)}
    sizes += [math.prod(stored.shape(name)) for name in plain]
    return len(sizes), sum(sizes)


def num_saved_bytes(stored: StoredTensors, layout: Format | None, dtype: torch.dtype) -> int:
    """Return how many bytes less matrices of small integers take than widened ones.

    It is estimated from the first rows of each.
    """
    saved = 0
    for name, shape in ({} if layout is None else _matrices(stored, layout)).items():
        if len(shape) != 2:
            continue
        assert layout is not None
        rows = slice(0, min(shape[0], SAMPLE_ROWS))
        coded = layout.read(stored, name, rows, slice(0, shape[1])).coded()
        if coded is not None:
            widened = rows.stop * shape[1] * dtype.itemsize
            saved += (widened - coded.num_bytes) * shape[0] // rows.stop
    return saved


def _matrices(stored: StoredTensors, layout: Format) -> dict[str, tuple[int, ...]]:
    """Return the plain shapes of the quantised matrices by the names of their parameters."""
    names = {_parameter_name(name) for name in stored.names()}
    shapes = {name: layout.shape(stored, name) for name in sorted(names)}
    return {name: shape for name, shape in shapes.items() if shape is not None}


CODE_LEAVES = (".qweight", ".weight_packed", "_blocks")


def _parameter_name(name: str) -> str:
    """Return the parameter that a tensor of codes belongs to."""
    return (
        name.removesuffix("_blocks").replace(".qweight", ".weight").replace("_packed", "")
        if name.endswith(CODE_LEAVES)
        else name
    )
