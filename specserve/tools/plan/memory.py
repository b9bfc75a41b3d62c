"""What a model takes of a device, how many GPUs must share it, and how many sequences then fit. By its config alone; reads no weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specserve.errors import BadValue, NoShardingPlan, TooLittleMemory
from specserve.models.checkpoints.describe import Described, describe
from specserve.models.memory import pages_for

GIB = 2**30
GPUS = {  # GiB, as nvidia-smi and rocm-smi state them
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


@dataclass(frozen=True, slots=True)
class Gpus:
    """So many devices of one kind."""

    count: int
    gib: float

    @classmethod
    def of(cls, text: str) -> Gpus:
        """4xH100, H100, 4x80 (GiB each)."""
        match = re.fullmatch(r"(?:(\d{1,5})x)?([\w.-]+)", text.strip(), re.IGNORECASE)
        if match is None or match[1] == "0":
            raise BadValue(
                f"--gpus takes such as 4x80 (GiB each) or 4xH100, not {text!r}", param="gpus"
            )
        return cls(int(match[1] or 1), _gib(match[2]))


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
class Share:
    """What one rank holds of a model."""

    num_parameters: int
    weight_bytes: int
    kv_bytes: int  # of one position
    page_bytes: int

    @classmethod
    def of(cls, described: Described, dtype: torch.dtype, page_size: int) -> Share:
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


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on so many GPUs, or why it does not go there."""

    ranks: int
    share: Share | None = None  # None: they cannot share it
    pages: int = 0
    sequences: int = 0  # of the planned context
    reason: str = ""

    @property
    def works(self) -> bool:
        return self.sequences > 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How memory is dealt with; the names are those of the config."""

    dtype: torch.dtype
    page_size: int
    memory_fraction: float  # of what is free once the weights are there
    context: int  # positions that a sequence is planned to take


def whole(model: Path, plan: Plan) -> Share:
    """All of a model on one device."""
    return Share.of(describe(model), plan.dtype, plan.page_size)


def fits(model: Path, gpus: Gpus, plan: Plan) -> list[Fit]:
    """Every degree of tensor parallelism that these GPUs allow, the smallest first."""
    return [_fit(model, ranks, gpus.gib, plan) for ranks in range(1, gpus.count + 1)]


def smallest(found: Sequence[Fit]) -> Fit | None:
    """The first that works: every further rank adds an all-reduce to each layer, so no more than needed."""
    return next((fit for fit in found if fit.works), None)


def _fit(model: Path, ranks: int, gib: float, plan: Plan) -> Fit:
    try:
        described = describe(model, ranks=ranks)
    except NoShardingPlan as refusal:
        return Fit(ranks, reason=str(refusal))
    spec, share = described.spec, Share.of(described, plan.dtype, plan.page_size)
    free = int(gib * GIB) - share.weight_bytes
    if free <= 0:
        return Fit(ranks, share, reason="the weights alone are too large")
    try:
        pages = pages_for(
            int(free * plan.memory_fraction),
            num_layers=spec.num_layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            dtype=plan.dtype,
            page_size=plan.page_size,
        )
    except TooLittleMemory:
        pages = 0
    sequences = pages // -(-plan.context // plan.page_size)
    return Fit(
        ranks,
        share,
        pages,
        sequences,
        "" if sequences else f"not one sequence of {plan.context:,} tokens fits beside the weights",
    )
