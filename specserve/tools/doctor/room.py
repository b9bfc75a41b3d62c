"""Whether target and draft find room: by the estimates of `specserve plan`, against the memory of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from specserve.config.tree import Config, Draft, Target
from specserve.models.checkpoints.describe import describe
from specserve.models.memory import free_memory
from specserve.models.model import DTYPES, MEMORY_SHARE, dtype_of
from specserve.tools.doctor.findings import Finding, bad, gib, ok, warn
from specserve.tools.plan.memory import Share


@dataclass(frozen=True, slots=True)
class Need:
    """What one device must hold."""

    weight_bytes: int
    context_bytes: int  # keys and values of one sequence at its longest


def room(config: Config, target: Path, draft: Path | None) -> Iterator[Finding]:
    """`draft` is None where it has no model of its own."""
    degree = config.target.tensor_parallel
    rank = need(target, config.target, config, ranks=degree)
    guesser = None if draft is None else need(draft, config.draft, config)
    if on_gpu(config.target):
        yield from _on_gpus(config, rank, guesser)
    else:
        whole = Need(rank.weight_bytes * degree, rank.context_bytes * degree)
        yield from fits(
            "memory for the target", whole, free_memory(torch.device("cpu")), config, beside=guesser
        )


def need(path: Path, own: Target | Draft, config: Config, *, ranks: int = 1) -> Need:
    described = describe(path, ranks=ranks)
    dtype = (
        DTYPES[own.dtype]
        if own.dtype != "auto"
        else dtype_of("auto", torch.device("cuda" if on_gpu(own) else "cpu"))
    )
    share = Share.of(described, dtype, config.cache.page_size)
    context = min(
        described.spec.max_context, config.limits.max_context or described.spec.max_context
    )
    return Need(share.weight_bytes, share.kv_bytes * context)


def on_gpu(own: Target | Draft) -> bool:
    return own.device.startswith("cuda") or (own.device == "auto" and torch.cuda.is_available())


def _on_gpus(config: Config, rank: Need, guesser: Need | None) -> Iterator[Finding]:
    """The ranks on the first devices, the draft on the next."""
    there, degree = torch.cuda.device_count(), config.target.tensor_parallel
    if there < degree:
        remedy = "where they are on other nodes, `specserve plan --gpus` estimates; else lower target.tensor_parallel, or set target.device to cpu"
        yield warn(
            "memory", f"the target wants {degree} GPUs, and this machine shows {there}", remedy
        )
        return
    poorest = min(free_memory(torch.device("cuda", number)) for number in range(degree))
    alone = guesser is None or not on_gpu(config.draft) or there > degree
    yield from fits(
        f"memory of {degree} GPUs" if degree > 1 else "memory of the GPU",
        rank,
        poorest,
        config,
        beside=None if alone else guesser,
    )
    if guesser is not None and on_gpu(config.draft) and there > degree:
        yield from fits(
            "memory of the draft's GPU", guesser, free_memory(torch.device("cuda", degree)), config
        )


def fits(
    subject: str, own: Need, free: int, config: Config, *, beside: Need | None = None
) -> Iterator[Finding]:
    """Weights, then a share of what is left for keys and values, as the engine deals memory out."""
    other = 0 if beside is None else beside.weight_bytes
    left = free - own.weight_bytes - other
    found = f"weights {gib(own.weight_bytes + other)} of {gib(free)} free"
    if left <= 0:
        remedy = "raise target.tensor_parallel (`specserve plan --gpus` says how far), use a smaller model, or free memory"
        yield bad(subject, found, remedy)
        return
    pages = left * (config.cache.memory_fraction or MEMORY_SHARE)
    sequences = pages / own.context_bytes
    found = (
        f"{found}; {gib(pages)} for keys and values, {sequences:.1f} sequences of the whole context"
    )
    if sequences < 1:
        yield warn(
            subject,
            found,
            "long texts will be refused: set limits.max_context lower, or cache.memory_fraction higher",
        )
    else:
        yield ok(subject, found)
