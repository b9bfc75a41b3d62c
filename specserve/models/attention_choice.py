"""Choose the attention of a model: what `auto` means, and what cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from specserve.errors import ConfigError
from specserve.models.attention import Attention, GroupedAttention, Kernel
from specserve.models.attention_kernels import invariant_kernel, sdpa_kernel
from specserve.models.checkpoints.load import LoadedModel
from specserve.models.cpu.linear_kernels import CompiledKernel, linear_kernel
from specserve.models.device_formats import runs_compiled
from specserve.models.gpu.flashinfer_attention import FlashInferUnusable, open_flashinfer

log = logging.getLogger(__name__)

FLASHINFER = "flashinfer"
KERNELS: Mapping[str, Kernel] = {"invariant": invariant_kernel, "sdpa": sdpa_kernel}
"""Attention kernels that run on every device."""


def attention_name(name: str, *, kernel: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return which attention is wanted: on GPUs `auto` until the model is there to try it with.

    Raises ConfigError for one that does not run here.
    """
    if name not in ("auto", FLASHINFER, *KERNELS):
        known = ", ".join(("auto", FLASHINFER, *KERNELS))
        raise ConfigError(f"attention: {name} is none of {known}.")
    if name == FLASHINFER and device.type != "cuda":
        raise ConfigError("attention: flashinfer needs a CUDA device; use attention: auto.")
    if name != "auto":
        return name
    if device.type == "cuda":
        return "auto"
    return "compiled" if runs_compiled(kernel, dtype, device) else "invariant"


def open_attention(
    name: str,
    loaded: LoadedModel,
    *,
    kernel: str,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    page_dtype: torch.dtype,
) -> Attention:
    """Return the attention of that name; heads that compiled code cannot take get `invariant`.

    On a GPU, `auto` is FlashInfer's if it is there and computes the right numbers, else torch's.
    """
    spec = loaded.spec
    if name in ("auto", FLASHINFER):
        try:
            return open_flashinfer(loaded, page_size, dtype, device, page_dtype)
        except FlashInferUnusable as error:
            if name == FLASHINFER:
                raise ConfigError(
                    f"attention: flashinfer cannot be used: {error}; use auto."
                ) from error
            log.info("Attention: torch's own (sdpa); FlashInfer cannot be used: %s", error)
            return GroupedAttention(sdpa_kernel)
    if name != "compiled":
        return GroupedAttention(KERNELS[name])
    if spec.is_encoder_decoder:
        return GroupedAttention(invariant_kernel)
    shared = spec.num_heads // spec.kv_heads
    return open_compiled(kernel, spec.head_dim, spec.v_head_dim, shared=shared, page_size=page_size)


def open_compiled(kernel: str, dim: int, v_dim: int, *, shared: int, page_size: int) -> Attention:
    """Return compiled attention; heads that it cannot take get `invariant`."""
    from specserve.models.cpu.compiled_attention import CompiledAttention, fits

    compiled = linear_kernel(kernel)
    assert isinstance(compiled, CompiledKernel)
    if not fits(dim, v_dim, shared=shared):
        return GroupedAttention(invariant_kernel)
    return CompiledAttention(compiled.functions.attention, shared=shared, page_size=page_size)
