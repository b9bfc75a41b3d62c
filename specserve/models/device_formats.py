"""The device of a model, and its number formats there: what `auto` means, and what is refused.

Reads config.json alone; knows no weights.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from specserve.errors import ConfigError
from specserve.models.checkpoints.library import is_encoder_decoder, read_config
from specserve.models.checkpoints.quantized.formats import multiplies_float8
from specserve.models.checkpoints.quantized.page_scales import states_float8_pages
from specserve.models.checkpoints.weights import Codes, num_weight_bytes
from specserve.models.cpu.linear_kernels import CompiledKernel, linear_kernel, multiplies_bf16
from specserve.models.float8_weight import FLOAT8
from specserve.models.gpu.float8_kernels import float8_fault

log = logging.getLogger(__name__)

FP8 = "fp8"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_device(name: str) -> torch.device:
    """Return the device of that name, with its number if it is a CUDA device.

    Raises ConfigError for one that is not there.
    """
    count = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if count else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    number = device.index or 0
    if number >= count:
        there = f"only {count} can be seen" if count else "no CUDA device is visible"
        raise ConfigError(
            f"device {name} was asked for, and {there}; set target.device or draft.device to cpu "
            "(`specserve doctor` says more)."
        )
    return torch.device("cuda", number)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the number format `name`; `auto` is the one that the device computes fast."""
    if name != "auto":
        return DTYPES[name]
    fast = device.type == "cuda" or multiplies_bf16()
    return torch.bfloat16 if fast else torch.float32


def resolve_page_dtype(
    directory: Path, name: str, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Return the number format of a model's pages; `auto` is what its checkpoint says.

    Reads config.json only. Raises ConfigError for FP8 that is requested where there is none.
    """
    is_stated = states_float8_pages(directory)
    if name == "auto" and not is_stated:
        return dtype
    if is_encoder_decoder(read_config(directory)):
        reason = "an encoder-decoder's keys and values are in the model's"
    elif device.type == "cpu":
        reason = "the target's device is the CPU, where pages are in the model's"
    else:
        return FLOAT8
    if name == FP8:
        raise ConfigError(
            f"cache.dtype: fp8 cannot be had for {directory}: {reason} number format; "
            "leave cache.dtype out"
        )
    log.info("%s states a KV cache in FP8; %s number format", directory.name, reason)
    return dtype


def require_device_for(round_to: str | None, device: torch.device) -> None:
    """Raise ConfigError if the device computes with no weights that are rounded to this."""
    if round_to == FP8 and device.type == "cpu":
        raise ConfigError(
            "draft.quantize: fp8 needs a GPU, and the draft's device is the CPU, which multiplies "
            "no FP8; use int8"
        )


def report_float8(
    directory: Path, dtype: torch.dtype, device: torch.device, num_bytes: int
) -> None:
    """Log whether FP8 weights are kept as such, and what they take."""
    whole = num_weight_bytes(directory, dtype)
    if (fault := float8_fault(device, dtype)) is None:
        log.info(
            "%s in FP8: its weights take %.1f GB, and would take %.1f GB whole",
            *(directory.name, num_bytes / 1e9, whole / 1e9),
        )
        return
    log.warning(
        "draft.quantize: fp8 gains nothing: %s. Its weights are rounded and widened again, take "
        "%.1f GB as whole ones do, and a pass reads all of it",
        *(fault, whole / 1e9),
    )


def codes_kept(
    directory: Path,
    kernel: str,
    dtype: torch.dtype,
    device: torch.device,
    round_to: str | None = None,
) -> Codes | None:
    """Return which quantised weights linear layers compute with as they are; None: with none.

    They are the checkpoint's, or what its weights are rounded to as they are read.
    """
    if device.type == "cpu":
        return Codes.INTEGERS if runs_compiled(kernel, dtype, device) else None
    if not is_for_float8(directory, round_to) or float8_fault(device, dtype) is not None:
        return None
    return Codes.FLOAT8


def is_for_float8(directory: Path, round_to: str | None) -> bool:
    """Return whether a GPU that multiplies FP8 keeps a checkpoint's weights, as rounded, in it."""
    return round_to == FP8 or (round_to is None and multiplies_float8(directory))


def runs_compiled(kernel: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether what runs on a device is compiled here."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and isinstance(linear_kernel(kernel), CompiledKernel)
    )
