"""Says why a model's texts may depend on what else is served, or that they do not.

They do not where every kernel in use gives a row the same bits alone and beside others, by trial.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specserve.models.attention_choice import attention_name
from specserve.models.checkpoints.architecture import Architecture, architecture
from specserve.models.checkpoints.library import (
    empty_module,
    library_errors,
    quiet_library,
    read_config,
)
from specserve.models.cpu.row_invariance import float32_row_step, is_batch_invariant
from specserve.models.device_formats import resolve_dtype
from specserve.models.layers import (
    PrivateWeights,
    is_packed_format,
    kernel_for,
    linear_weights,
    weight_of_linear,
)
from specserve.models.planner import key_block_size
from specserve.processor import uses_amx

ON_GPU = "on GPUs libraries choose the kernel of a product by its number of rows"
WITH_AMX = "oneDNN may use AMX, whose products depend on their number of rows"
CPU = torch.device("cpu")


def why_irreproducible(
    module: nn.Module,
    spec: Architecture,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
    failed: Collection[tuple[int, int]],
) -> str | None:
    """Return the reason, or None if texts do not depend on what else is served.

    `module` is the library's; `failed` are shapes [in, out] of linear layers at which each kernel
    failed its trial.
    """
    if device.type != "cpu":
        return ON_GPU
    if not is_packed_format(dtype):
        return f"products in {str(dtype).removeprefix('torch.')} depend on their number of rows"
    if attention == "sdpa":
        return "target.attention: sdpa depends on the number of rows"
    if uses_amx():
        return WITH_AMX
    if (name := _untried_weight(module)) is not None:
        return f"{name} is multiplied by the library, whose products are not tried"
    if failed:
        inner, outer = min(failed)
        return f"linear layers from {inner} to {outer} depend on their number of rows here"
    if dtype == torch.float32 and not _keeps_float32_rows(spec):
        return "attention in float32 depends on its number of rows on this processor"
    return None


def expected_reason(directory: Path, *, dtype: str, attention: str, kernel: str) -> str | None:
    """Return the reason by what a checkpoint's config says, for one rank on CPUs.

    Kernels are tried at the shapes of the library's layers; ours are joined ones.
    """
    config, found = read_config(directory), resolve_dtype(dtype, CPU)
    with quiet_library(), library_errors(directory):
        module = empty_module(config, dtype=found, attention="eager")
        spec = architecture(directory, config, 1)
    with linear_weights(PrivateWeights(kernel)) as failed:
        for part in module.modules() if is_packed_format(found) else ():
            if (weight := weight_of_linear(part)) is not None:
                kernel_for(weight)
    name = attention_name(attention, kernel=kernel, device=CPU, dtype=found)
    return why_irreproducible(module, spec, device=CPU, dtype=found, attention=name, failed=failed)


def _untried_weight(module: Any) -> str | None:
    """Return the name of a weight that the library multiplies, such as one of experts."""
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding) or weight_of_linear(part) is not None:
            continue
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.dim() > 1:
                return f"{path}.{name}"
    return None


def _keeps_float32_rows(spec: Architecture) -> bool:
    """Return whether the products of attention keep the bits of a row at these heads."""
    block = key_block_size(spec.kv_heads * min(spec.head_dim, spec.v_head_dim))
    shapes = ((spec.head_dim, block), (block, spec.v_head_dim))
    return all(is_batch_invariant(float32_row_step(*shape), *shape) for shape in shapes)
