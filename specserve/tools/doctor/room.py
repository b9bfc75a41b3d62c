"""Findings about memory: the estimates of `specserve plan` against this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specserve.config.sections import DraftConfig, TargetConfig
from specserve.config.tree import Config
from specserve.models.checkpoints.find import describe
from specserve.models.checkpoints.quantized.formats import multiplies_float8
from specserve.models.device_formats import DTYPES, FP8, resolve_dtype
from specserve.models.memory import free_memory
from specserve.models.model import DEFAULT_MEMORY_FRACTION, ModelOptions
from specserve.tools.doctor.findings import Finding, bad, gib, ok, warn
from specserve.tools.plan.memory import MemoryShare, share_here, with_pages


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on one device: weights, and the KV cache of one sequence of full length."""

    weight_bytes: int
    context_bytes: int


def room(config: Config, target: Path, draft: Path | None) -> Iterator[Finding]:
    """Check that target and draft fit. `draft` is None if it has no model of its own."""
    degree = config.target.tensor_parallel
    rank = memory_need(target, config.target, config, ranks=degree)
    draft_need = None if draft is None else memory_need(draft, config.draft, config)
    if on_gpu(config.target):
        yield from _on_gpus(config, rank, draft_need)
    else:
        whole = MemoryNeed(rank.weight_bytes * degree, rank.context_bytes * degree)
        yield from fits(
            "memory for the target",
            whole,
            free_memory(torch.device("cpu")),
            config,
            beside=draft_need,
        )


def memory_need(
    path: Path, own: TargetConfig | DraftConfig, config: Config, *, ranks: int = 1
) -> MemoryNeed:
    described = describe(path, ranks=ranks)
    if own is config.target and config.demo.size is not None:
        described = replace(described, num_parameters=config.demo.size // ranks)
    dtype = (
        DTYPES[own.dtype]
        if own.dtype != "auto"
        else resolve_dtype("auto", torch.device("cuda" if on_gpu(own) else "cpu"))
    )
    share = MemoryShare.from_description(described, dtype, config.cache.page_size)
    is_as_stored = own is config.draft or config.demo.size is None
    options = ModelOptions.from_config(own, config)
    if on_gpu(own) and torch.cuda.is_available():
        share = with_pages(path, share, dtype, device=own.device, page_dtype=options.page_dtype)
    # On GPUs only FP8 is kept small; this machine's are tried.
    is_small = (
        torch.cuda.is_available() and (options.round_to == FP8 or multiplies_float8(path))
        if on_gpu(own)
        else ranks == 1
    )
    if is_as_stored and is_small:
        share = share_here(
            path,
            share,
            dtype,
            device=own.device if on_gpu(own) else "cpu",
            kernel=options.kernel,
            round_to=options.round_to,
            ranks=ranks,
        )
    context = min(
        described.spec.max_context, config.limits.max_context or described.spec.max_context
    )
    return MemoryNeed(share.weight_bytes, share.kv_bytes * context)


def on_gpu(own: TargetConfig | DraftConfig) -> bool:
    return own.device.startswith("cuda") or (own.device == "auto" and torch.cuda.is_available())


def _on_gpus(config: Config, rank: MemoryNeed, draft_need: MemoryNeed | None) -> Iterator[Finding]:
    """Check the ranks on the first devices and the draft on the next."""
    there, degree = torch.cuda.device_count(), config.target.tensor_parallel
    if there < degree:
        remedy = (
            "where they are on other nodes, `specserve plan --gpus` estimates; else lower "
            "target.tensor_parallel, or set target.device to cpu"
        )
        yield warn(
            "memory", f"the target wants {degree} GPUs, and this machine shows {there}", remedy
        )
        return
    poorest = min(free_memory(torch.device("cuda", number)) for number in range(degree))
    alone = draft_need is None or not on_gpu(config.draft) or there > degree
    yield from fits(
        f"memory of {degree} GPUs" if degree > 1 else "memory of the GPU",
        rank,
        poorest,
        config,
        beside=None if alone else draft_need,
    )
    if draft_need is not None and on_gpu(config.draft) and there > degree:
        yield from fits(
            "memory of the draft's GPU",
            draft_need,
            free_memory(torch.device("cuda", degree)),
            config,
        )


def fits(
    subject: str, own: MemoryNeed, free: int, config: Config, *, beside: MemoryNeed | None = None
) -> Iterator[Finding]:
    """Check the memory as the engine divides it: weights, then a share of the rest for pages."""
    other = 0 if beside is None else beside.weight_bytes
    left = free - own.weight_bytes - other
    found = f"weights {gib(own.weight_bytes + other)} of {gib(free)} free"
    if left <= 0:
        remedy = (
            "raise target.tensor_parallel (`specserve plan --gpus` says how far), use a smaller "
            "model, or free memory"
        )
        yield bad(subject, found, remedy)
        return
    pages = left * (config.cache.memory_fraction or DEFAULT_MEMORY_FRACTION)
    sequences = pages / own.context_bytes
    count = f"{sequences:,.0f}" if sequences >= 10 else f"{sequences:.1f}"
    found = f"{found}; {gib(pages)} for keys and values, {count} sequences of the whole context"
    if sequences < 1:
        yield warn(
            subject,
            found,
            "long texts will be refused: set limits.max_context lower, or cache.memory_fraction "
            "higher",
        )
    else:
        yield ok(subject, found)
