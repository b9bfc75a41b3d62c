"""Write a copy of a checkpoint with small weights, in the files of the compressed-tensors library.

Tensors are read, rounded and written one by one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specserve.errors import BadValue, UnsupportedModel
from specserve.models.checkpoints.held_bytes import check_can_round
from specserve.models.checkpoints.library import empty_module, quiet_library, read_config
from specserve.models.checkpoints.rounding import (
    group_for,
    linear_layers,
    pack_integers,
    round_to_float8,
    round_to_integers,
    rounded_layers,
)
from specserve.models.checkpoints.tensors import rename
from specserve.models.checkpoints.text_part import is_multimodal
from specserve.models.checkpoints.writer import companions, stored_files, write_tensors
from specserve.progress import ReportProgress, no_progress

ENCODED = (torch.bfloat16, torch.float16, torch.float32)

CARD = """# {name} in {to}

A copy of `{name}` whose {matrices} linear layers have weights in {to}, rounded to the nearest by
`specserve quantize`. It computes something slightly different. The licence is that of the original.
"""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to store matrices: the compressed-tensors library's name of it, and its arguments."""

    layout: str
    weights: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, name: str, matrix: Tensor, group: int) -> dict[str, Tensor]:
        """Return the tensors that stand for a matrix [out, in]."""
        numbers = matrix.float()
        bits = self.weights["num_bits"]
        if self.weights["type"] == "float":
            codes, scales = round_to_float8(numbers, matrix.dtype)
            return {name: codes, f"{name}_scale": scales}
        integers, scales = round_to_integers(numbers, bits, group or matrix.shape[1], matrix.dtype)
        return {
            f"{name}_packed": pack_integers(integers, bits),
            f"{name}_scale": scales,
            f"{name}_shape": torch.tensor(matrix.shape),
        }

    def described(self, group: int, ignored: Collection[str]) -> dict[str, Any]:
        """Return what config.json says of it."""
        weights = {**self.weights, "symmetric": True, "dynamic": False, "group_size": group or None}
        parts = {"targets": ["Linear"], "weights": weights, "format": self.layout}
        unused = dict.fromkeys(("input_activations", "output_activations"))
        return {
            "quant_method": "compressed-tensors",
            "format": self.layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**parts, **unused}},
            "ignore": sorted(ignored),
        }


SCHEMES: Mapping[str, Scheme] = {
    "int8": Scheme("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int4": Scheme("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group"}),
    "fp8": Scheme("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
}


def write_quantized(
    source: Path, to: str, out: Path, report_progress: ReportProgress = no_progress
) -> int:
    """Write a copy of a checkpoint with small weights to `out`, which must be new or empty.

    Returns how many matrices were rounded. Raises BadValue or ModelError.
    """
    config = read_config(source)
    check_can_round(source, config)
    if is_multimodal(source):
        raise UnsupportedModel(f"{source} is multimodal; only plain decoders can be copied so")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadValue(f"--out {out} is not empty; name a new directory.", param="out")
    files = _tensor_files(source)
    matrices, ignored = _choose(config, files, source)
    scheme, group = SCHEMES[to], _group(to, files, matrices)
    out.mkdir(parents=True, exist_ok=True)
    write_tensors(_encoded(files, matrices, scheme, group, report_progress), out)
    stated = json.loads((source / "config.json").read_text())
    stated["quantization_config"] = scheme.described(group, ignored)
    (out / "config.json").write_text(json.dumps(stated, indent=2) + "\n")
    card = CARD.format(name=source.resolve().name, to=to, matrices=len(matrices))
    (out / "README.md").write_text(card)
    for path in companions(source):
        shutil.copyfile(path, out / path.name)
    return len(matrices)


def _tensor_files(source: Path) -> dict[str, Path]:
    found = {}
    for path in stored_files(source):
        with safe_open(path, framework="pt") as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


@quiet_library()
def _choose(config: Any, names: Collection[str], source: Path) -> tuple[set[str], set[str]]:
    """Return the stored weights to round, and the linear layers that stay as they are."""
    module: Any = empty_module(config, dtype=torch.bfloat16, attention="eager")
    linears, rounded = linear_layers(module), rounded_layers(module)
    prefix = module.base_model_prefix
    by_name = {f"{name}.weight": name for name in linears}
    by_name |= {weight.removeprefix(f"{prefix}."): name for weight, name in by_name.items()}
    owners = {name: by_name[rename(name)] for name in names if rename(name) in by_name}
    chosen = {name for name, owner in owners.items() if owner in rounded}
    if not chosen:
        raise UnsupportedModel(
            f"{source} cannot be quantized: {config.model_type} keeps no matrix in a linear layer."
        )
    return chosen, linears - rounded


def _group(to: str, files: Mapping[str, Path], matrices: Collection[str]) -> int:
    """Return the columns that share a scale; 0 for whole rows."""
    if SCHEMES[to].weights["strategy"] != "group":
        return 0
    return group_for({name: _width(files[name], name) for name in sorted(matrices)})


def _width(path: Path, name: str) -> int:
    with safe_open(path, framework="pt") as file:
        return int(file.get_slice(name).get_shape()[1])


def _encoded(
    files: Mapping[str, Path],
    matrices: Collection[str],
    scheme: Scheme,
    group: int,
    report_progress: ReportProgress,
) -> Iterator[tuple[str, Tensor]]:
    for number, (name, path) in enumerate(files.items()):
        report_progress("rounding", number / len(files), name)
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if name in matrices and tensor.dtype in ENCODED:
            yield from scheme.encode(name, tensor, group).items()
        else:
            yield name, tensor
