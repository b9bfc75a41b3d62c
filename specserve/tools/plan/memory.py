"""Memory of a model on devices: weights, pages, tensor-parallel degree and sequences that fit.

Computed from the config alone; reads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specserve.errors import BadValue, NoShardingPlan, TooLittleMemory
from specserve.models.checkpoints.find import ModelDescription, describe
from specserve.models.checkpoints.held_bytes import (
    check_can_round,
    num_bytes_saved_by_rounding,
    num_held_bytes,
)
from specserve.models.checkpoints.library import read_config
from specserve.models.checkpoints.quantized.formats import read_format
from specserve.models.checkpoints.weights import Codes
from specserve.models.device_formats import (
    codes_kept,
    is_for_float8,
    require_device_for,
    resolve_device,
    resolve_page_dtype,
)
from specserve.models.memory import num_pages_for, page_bytes

GIB = 2**30
GPUS = {
    "A100": 80.0,
    "A100-40": 40.0,
    "A10G": 22.5,
    "B200": 179.0,
    "H100": 79.6,
    "H200": 140.4,
    "L4": 22.5,
    "L40S": 45.0,
    "MI300X": 192.0,
    "RTX3090": 24.0,
    "RTX4090": 24.0,
    "T4": 15.0,
    "V100": 32.0,
    "V100-16": 16.0,
}
"""Memory in GiB, as nvidia-smi and rocm-smi state it."""
FLOAT8_GPUS = frozenset({"B200", "H100", "H200", "L4", "L40S", "RTX4090"})
"""Those that multiply FP8 as checkpoints have it."""


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """Devices of one kind."""

    count: int
    gib: float
    has_float8: bool = False

    @classmethod
    def parse(cls, text: str) -> GpuGroup:
        """Return the devices of a text such as 4xH100, H100 or 4x80 (GiB each)."""
        match = re.fullmatch(r"(?:(\d{1,5})x)?([\w.-]+)", text.strip(), re.IGNORECASE)
        if match is None or match[1] == "0":
            raise BadValue(
                f"--gpus takes such as 4x80 (GiB each) or 4xH100, not {text!r}", param="gpus"
            )
        name = match[2].upper()
        return cls(int(match[1] or 1), _gib(name), name in FLOAT8_GPUS)


def _gib(text: str) -> float:
    if re.fullmatch(r"\d{1,6}(\.\d+)?", text) and float(text) > 0:
        return float(text)
    if text.upper() not in GPUS:
        raise BadValue(
            f"--gpus knows no {text!r}; say its GiB, as in 4x80, or one of {', '.join(GPUS)}",
            param="gpus",
        )
    return GPUS[text.upper()]


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Part of a model on one rank. `kv_bytes` are for one position."""

    num_parameters: int
    weight_bytes: int
    kv_bytes: int
    page_bytes: int

    @classmethod
    def from_description(
        cls, described: ModelDescription, dtype: torch.dtype, page_size: int
    ) -> MemoryShare:
        spec = described.spec
        kv_bytes = (
            spec.num_layers * spec.kv_heads * (spec.head_dim + spec.v_head_dim) * dtype.itemsize
        )
        return cls(
            described.num_parameters,
            described.num_parameters * dtype.itemsize,
            kv_bytes,
            kv_bytes * page_size,
        )

    def with_pages_of(self, page_dtype: torch.dtype, dtype: torch.dtype) -> MemoryShare:
        """Return the share with pages in another number format than `dtype`, the model's."""
        new, old = page_dtype.itemsize, dtype.itemsize
        return replace(
            self, kv_bytes=self.kv_bytes * new // old, page_bytes=self.page_bytes * new // old
        )


@dataclass(frozen=True, slots=True)
class PlannedFit:
    """Model on `ranks` GPUs, or the reason why it does not fit.

    `share` is None if the ranks cannot share the model; `sequences` have the planned context.
    """

    ranks: int
    share: MemoryShare | None = None
    pages: int = 0
    sequences: int = 0
    reason: str = ""

    @property
    def works(self) -> bool:
        return self.sequences > 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Division of memory, with the names of the config.

    `memory_fraction` is of the memory that is free beside the weights; `context` is the number of
    positions of a planned sequence.
    """

    dtype: torch.dtype
    page_size: int
    memory_fraction: float
    context: int


def whole_model_share(model: Path, plan: MemoryPlan) -> MemoryShare:
    """Return the share of a device that has the whole model."""
    return MemoryShare.from_description(describe(model), plan.dtype, plan.page_size)


def share_here(
    model: Path,
    share: MemoryShare,
    dtype: torch.dtype,
    *,
    device: str = "auto",
    kernel: str = "auto",
    round_to: str | None = None,
    ranks: int = 1,
) -> MemoryShare:
    """Return the share of one of `ranks` with what its weights take on this machine.

    Where the device computes with quantised weights as they are, that is less than config.json
    says; `round_to` int8, int4 or fp8 quantises them as they are read. Weights of quantised files
    that are not here are counted as widened.
    """
    there = resolve_device(device)
    require_device_for(round_to, there)
    keeps = codes_kept(model, kernel, dtype, there, round_to)
    return _as_kept(model, share, dtype, keeps, ranks, round_to)


def with_pages(
    model: Path,
    share: MemoryShare,
    dtype: torch.dtype,
    *,
    device: str = "auto",
    page_dtype: str = "auto",
) -> MemoryShare:
    """Return a share with what pages take on a device, whose number format may be their own."""
    pages = resolve_page_dtype(model, page_dtype, dtype, resolve_device(device))
    return share.with_pages_of(pages, dtype)


def share_on(
    gpus: GpuGroup,
    model: Path,
    share: MemoryShare,
    dtype: torch.dtype,
    *,
    ranks: int = 1,
    round_to: str | None = None,
) -> MemoryShare:
    """Return the share of one of `ranks` GPUs with what its weights and pages take there.

    GPUs that multiply FP8 keep it, of checkpoints and of a draft that is rounded to it.
    """
    pages = resolve_page_dtype(model, "auto", dtype, torch.device("cuda", 0))
    share = share.with_pages_of(pages, dtype)
    has_float8 = gpus.has_float8 and dtype == torch.bfloat16 and is_for_float8(model, round_to)
    return _as_kept(model, share, dtype, Codes.FLOAT8 if has_float8 else None, ranks, round_to)


def _as_kept(
    model: Path,
    share: MemoryShare,
    dtype: torch.dtype,
    keeps: Codes | None,
    ranks: int,
    round_to: str | None,
) -> MemoryShare:
    """Return the share of one of `ranks` that hold quantised weights as they are, if they do."""
    if round_to is not None:
        check_can_round(model, read_config(model))
    if keeps is None:
        return share
    if round_to is not None:
        saved = num_bytes_saved_by_rounding(model, dtype, round_to)
        return replace(share, weight_bytes=share.weight_bytes - saved // ranks)
    has_weights = (model / "config.json").is_file() and any(model.glob("*.safetensors"))
    if not has_weights or read_format(model) is None:
        return share
    held = num_held_bytes(model, dtype, keeps=keeps, ranks=ranks)
    return replace(share, weight_bytes=-(-held // ranks))


def fits(
    model: Path, gpus: GpuGroup, plan: MemoryPlan, *, round_to: str | None = None
) -> list[PlannedFit]:
    """Return the fit for every degree of tensor parallelism, the smallest first."""
    return [_fit(model, ranks, gpus, plan, round_to) for ranks in range(1, gpus.count + 1)]


def smallest_fit(found: Sequence[PlannedFit]) -> PlannedFit | None:
    """Return the smallest degree that works; more ranks only add all-reduces."""
    return next((fit for fit in found if fit.works), None)


def _fit(
    model: Path, ranks: int, gpus: GpuGroup, plan: MemoryPlan, round_to: str | None
) -> PlannedFit:
    try:
        described = describe(model, ranks=ranks)
    except NoShardingPlan as error:
        return PlannedFit(ranks, reason=str(error))
    spec, share = (
        described.spec,
        MemoryShare.from_description(described, plan.dtype, plan.page_size),
    )
    share = share_on(gpus, model, share, plan.dtype, ranks=ranks, round_to=round_to)
    free = int(gpus.gib * GIB) - share.weight_bytes
    if free <= 0:
        return PlannedFit(ranks, share, reason="the weights alone are too large")
    page = page_bytes(
        num_layers=spec.num_layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        dtype=resolve_page_dtype(model, "auto", plan.dtype, torch.device("cuda", 0)),
        page_size=plan.page_size,
    )
    try:
        pages = num_pages_for(int(free * plan.memory_fraction), page, page_size=plan.page_size)
    except TooLittleMemory:
        pages = 0
    sequences = pages // -(-plan.context // plan.page_size)
    return PlannedFit(
        ranks,
        share,
        pages,
        sequences,
        "" if sequences else f"not one sequence of {plan.context:,} tokens fits beside the weights",
    )
