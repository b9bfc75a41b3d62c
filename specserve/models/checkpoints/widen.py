"""Widen a model: a small model's function at a large model's cost.

Speed can then be measured with real texts and a real alpha. Every gated MLP gets more columns; they
are computed, and their part of `down_proj` is zero, so they change nothing.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import safe_open
from torch import Tensor

from specserve.errors import BadValue, ModelNotFound, UnsupportedModel
from specserve.models.checkpoints.writer import companions, stored_files, write_tensors
from specserve.progress import ReportProgress, no_progress

MULTIPLE = 64
"""Intermediate sizes are multiples of it, because kernels are tuned for round sizes."""
STD = 0.02
"""Standard deviation of the random columns, as in trained ones, so that they cost the same."""
MLP = re.compile(r"\.mlp\.(gate|up|down)_proj\.(weight|bias)$")

CARD = """# {name}, widened to {reached:,} parameters

A copy of `{name}` ({own:,} parameters) for measuring speed. Every MLP was widened from {before}
to {after} columns; their part of `down_proj` is zero. The copy computes the function of the
original, no better, at the cost of a model of {reached:,} parameters. Figures measured with it
must be labelled "widened". Made by `specserve inflate`; the licence is that of the original.
"""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Checkpoint on disk whose MLPs are all gated and of one width; tensors are named."""

    directory: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    files: dict[str, Path]

    @property
    def width(self) -> int:
        return int(self.config["intermediate_size"])

    @property
    def num_parameters(self) -> int:
        """Number of parameters. A tied head that is stored nevertheless counts once."""
        tied = self.config.get("tie_word_embeddings", False)
        return sum(
            torch.Size(shape).numel()
            for name, shape in self.shapes.items()
            if not (tied and name == "lm_head.weight")
        )

    @property
    def column_parameters(self) -> int:
        """Number of parameters that one more column in every MLP adds."""
        sides = [
            shape[::-1] if "down_proj" in name else shape
            for name, shape in self.shapes.items()
            if _grows(name)
        ]
        return sum(torch.Size(shape[1:]).numel() for shape in sides)


def inflate(
    model_dir: Path, params: int, out_dir: Path, report_progress: ReportProgress = no_progress
) -> int:
    """Write a widened copy to `out_dir`, which must be new or empty; return its size.

    The size is the multiple nearest to `params`. Raises BadValue, ModelError, ModelNotFound or
    UnsupportedModel.
    """
    source = _open(model_dir)
    own = source.num_parameters
    if params < own:
        raise BadValue(
            f"--params must be at least the model's own {own:,}, not {params:,}: a model can be "
            "widened only.",
            param="params",
        )
    if out_dir.exists() and any(out_dir.iterdir()):
        raise BadValue(f"--out {out_dir} is not empty; name a new directory.", param="out")
    width = _new_width(source, params)
    reached = own + (width - source.width) * source.column_parameters
    out_dir.mkdir(parents=True, exist_ok=True)
    write_tensors(_widened(source, width, report_progress), out_dir)
    (out_dir / "config.json").write_text(
        json.dumps({**source.config, "intermediate_size": width}, indent=2) + "\n"
    )
    (out_dir / "README.md").write_text(
        CARD.format(
            name=model_dir.resolve().name,
            own=own,
            reached=reached,
            before=source.width,
            after=width,
        )
    )
    for path in companions(model_dir):
        shutil.copyfile(path, out_dir / path.name)
    return reached


def _open(directory: Path) -> Checkpoint:
    if not (directory / "config.json").is_file():
        raise ModelNotFound(
            f"--model {directory} is no model directory: it has no config.json; name one that has."
        )
    config = json.loads((directory / "config.json").read_text())
    shapes: dict[str, tuple[int, ...]] = {}
    files: dict[str, Path] = {}
    for path in stored_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                shapes[name], files[name] = tuple(file.get_slice(name).get_shape()), path
    checkpoint = Checkpoint(directory, config, shapes, files)
    _require_gated_mlps(checkpoint)
    return checkpoint


def _require_gated_mlps(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModel unless every MLP can be widened: all are, or the cost is wrong."""
    name = checkpoint.config.get("model_type", "this model")
    layers = checkpoint.config.get("num_hidden_layers")
    found = [MLP.search(tensor) for tensor in checkpoint.shapes]
    gates = [match for match in found if match and match[1] == "gate" and match[2] == "weight"]
    if (
        not isinstance(checkpoint.config.get("intermediate_size"), int)
        or not gates
        or len(gates) != layers
    ):
        raise UnsupportedModel(
            f"{name} cannot be widened: only models whose every MLP has gate_proj, up_proj and "
            "down_proj can."
        )
    if "quantization_config" in checkpoint.config:
        raise UnsupportedModel(f"{name} cannot be widened: it is quantized.")
    for tensor, shape in checkpoint.shapes.items():
        if _grows(tensor) and shape[1 if "down_proj" in tensor else 0] != checkpoint.width:
            raise UnsupportedModel(
                f"{name} cannot be widened: {tensor} does not have the configured intermediate "
                "size."
            )


def _grows(name: str) -> bool:
    """Return whether a tensor gets columns: all of an MLP except the bias of `down_proj`."""
    match = MLP.search(name)
    return match is not None and (match[1], match[2]) != ("down", "bias")


def _new_width(source: Checkpoint, params: int) -> int:
    """Return the multiple nearest to `params`, at least the width that the model has."""
    wanted = source.width + (params - source.num_parameters) / source.column_parameters
    return max(round(wanted / MULTIPLE), -(-source.width // MULTIPLE)) * MULTIPLE


def _widened(
    source: Checkpoint, width: int, report_progress: ReportProgress
) -> Iterator[tuple[str, Tensor]]:
    """Yield one tensor at a time, so that the copy may be larger than the memory."""
    for number, (name, path) in enumerate(source.files.items()):
        report_progress("widening", number / len(source.files), name)
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        yield name, _widen(name, tensor, width) if _grows(name) else tensor


def _widen(name: str, tensor: Tensor, width: int) -> Tensor:
    if "down_proj" in name:
        zeros = tensor.new_zeros(tensor.shape[0], width - tensor.shape[1])
        return torch.cat([tensor, zeros], dim=1)
    # Seeded by name, so that every copy is the same.
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    fresh = tensor.new_empty(width - tensor.shape[0], *tensor.shape[1:]).normal_(
        0.0, STD, generator=generator
    )
    return torch.cat([tensor, fresh])
