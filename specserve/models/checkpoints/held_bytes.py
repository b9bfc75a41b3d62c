"""Bytes that a checkpoint's weights take in memory, and the weights that stay quantised."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from specserve.errors import UnsupportedModel
from specserve.models.checkpoints.fill import float8_weights
from specserve.models.checkpoints.library import (
    base_model_name,
    empty_module,
    is_encoder_decoder,
    library_errors,
    quiet_library,
    read_config,
)
from specserve.models.checkpoints.quantized.float8 import StoredFloat8
from specserve.models.checkpoints.quantized.formats import method_of, read_format
from specserve.models.checkpoints.rounding import Rounding
from specserve.models.checkpoints.weights import (
    Codes,
    Weights,
    num_weight_bytes,
    weight_files,
)
from specserve.models.gpu.float8_kernels import float8_fault

log = logging.getLogger(__name__)


def check_can_round(directory: Path, config: Any) -> None:
    """Raise UnsupportedModel for a checkpoint whose weights cannot be quantised here."""
    if read_format(directory) is not None:
        raise UnsupportedModel(
            f"{directory} is quantized already ({method_of(directory)}); name the checkpoint that "
            "it was made from"
        )
    if is_encoder_decoder(config):
        raise UnsupportedModel(f"{directory} is an encoder-decoder; only decoders can be quantized")


def num_held_bytes(
    directory: Path,
    dtype: torch.dtype,
    *,
    keeps: Codes | None,
    round_to: str | None = None,
    ranks: int = 1,
) -> int:
    """Return the bytes of a checkpoint's weights in the memory of all ranks that share it.

    Linear layers hold what they keep of a quantised checkpoint, or what they are rounded to.
    """
    num_bytes = num_weight_bytes(directory, dtype, keeps_codes=keeps is Codes.INTEGERS)
    if keeps is not None and round_to is not None:
        return num_bytes - num_bytes_saved_by_rounding(directory, dtype, round_to)
    if keeps is not Codes.FLOAT8:
        return num_bytes
    kept = _kept_float8(directory, read_config(directory), ranks)
    return num_bytes - sum(part.num_numbers * dtype.itemsize - part.num_bytes for part in kept)


def _kept_float8(directory: Path, config: Any, ranks: int) -> list[StoredFloat8]:
    """Return the matrices of a checkpoint that GPUs multiply by as they are."""
    with quiet_library(), library_errors(directory):
        module = empty_module(config, dtype=torch.bfloat16, attention="eager")
        weights = Weights(directory, prefix=base_model_name(module))
        return list(kept_float8_weights(module, weights, ranks).values())


def kept_float8_weights(module: Any, weights: Weights, ranks: int) -> dict[str, StoredFloat8]:
    """Return the weights that stay as they are, by the names of a module's parameters."""
    if is_encoder_decoder(module.config):
        return {}
    found = float8_weights(module, weights)
    return {name: part for name, part in found.items() if part.refusal(ranks) is None}


def num_bytes_saved_by_rounding(directory: Path, dtype: torch.dtype, to: str) -> int:
    """Return how many bytes fewer a checkpoint's weights take once they are rounded.

    Reads config.json only. Raises UnsupportedModel for a checkpoint that cannot be rounded.
    """
    config = read_config(directory)
    check_can_round(directory, config)
    with quiet_library(), library_errors(directory):
        module = empty_module(config, dtype=dtype, attention="eager")
    return Rounding.from_module(module, to).num_saved_bytes(module, dtype)


def report_quantized(
    directory: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    size: int,
    *,
    keeps: Codes | None,
) -> None:
    """Log what the weights of a quantised checkpoint take, and why if they are widened."""
    if read_format(directory) is None:
        return
    name, method = directory.name, method_of(directory)
    stored = sum(path.stat().st_size for path in weight_files(directory)) / size / 1e9
    kept = num_held_bytes(directory, dtype, keeps=keeps, ranks=size) / size / 1e9
    widened = num_weight_bytes(directory, dtype) / size / 1e9
    ranks = "" if size == 1 else f" on each of {size} ranks"
    if kept < widened:
        log.info(
            "%s is quantized (%s): its weights take %.1f GB%s, and would take %.1f GB in %s",
            *(name, method, kept, ranks, widened, _dtype_name(dtype)),
        )
        return
    reason = _why_float8_is_widened(directory, config, dtype, device, size)
    log.warning(
        "%s is quantized (%s): its weights are widened to %s and take %.1f GB instead of %.1f GB"
        "%s%s",
        *(name, method, _dtype_name(dtype), widened, stored, ranks),
        "" if reason is None else f"; FP8 is not multiplied as it is, since {reason}",
    )


def _why_float8_is_widened(
    directory: Path, config: Any, dtype: torch.dtype, device: torch.device, ranks: int
) -> str | None:
    """Return why a GPU holds no FP8 matrix of a checkpoint as it is; None if it has none."""
    if device.type != "cuda":
        return None
    module = empty_module(config, dtype=dtype, attention="eager")
    found = float8_weights(module, Weights(directory, prefix=base_model_name(module)))
    if not found:
        return None
    if is_encoder_decoder(config):
        return "it is an encoder-decoder"
    reasons = {part.refusal(ranks) for part in found.values()}
    return float8_fault(device, dtype) if None in reasons else min(map(str, reasons))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
