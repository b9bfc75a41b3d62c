"""The choice of kernels between the products of a layer on a GPU: Triton's after a trial, or none.

Each takes the place of three to six operations of torch, of which a pass of few rows has hundreds,
at two microseconds or more each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.errors import first_line
from specserve.models.attention import Rotation

log = logging.getLogger(__name__)

ROWS, HEADS, KV_HEADS, DIM, SLOTS, WIDTH = 5, 4, 2, 48, 40, 1100
"""Sizes of a trial; neither dimension is a power of two."""
EPS = 1e-5
TOLERANCE = 2**-6


@dataclass(frozen=True, slots=True)
class CardKernels:
    """Kernels that have computed on a card what torch computes."""

    rotate_and_write: Callable[..., Tensor]  # as in `triton_kernels`
    gated: Callable[[Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]


@cache
def card_kernels(device: torch.device, dtype: torch.dtype) -> CardKernels | None:
    """Return the kernels for a GPU; None where Triton is missing, fails, or is wrong."""
    try:
        from specserve.models.gpu.triton_kernels import gated, rms_norm, rotate_and_write
    except ImportError as missing:
        log.info("Small operations by torch: %s", missing)
        return None
    kernels = CardKernels(rotate_and_write, gated, rms_norm)
    try:
        trials = (_rotation_error, _gate_error, _norm_error)
        error = max(trial(kernels, device, dtype) for trial in trials)
    except Exception as raised:  # compilers and drivers raise whatever they like
        log.warning("Small operations by torch: Triton fails: %s", first_line(raised))
        return None
    if not error <= TOLERANCE:
        log.warning("Small operations by torch: Triton's kernels are off by %.2g", error)
        return None
    return kernels


def _rotation_error(kernels: CardKernels, device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).to(dtype).to(device)

    qkv = random(ROWS, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    table = random(9, 2, 1, DIM)
    positions = torch.tensor([8, 0, 3, 3, 5], device=device)
    slots = torch.tensor([7, 0, 39, 12, 13], device=device)
    keys, values = random(SLOTS, KV_HEADS, DIM), random(SLOTS, KV_HEADS, DIM)
    pools = keys.clone(), values.clone()
    found = kernels.rotate_and_write(q, k, v, table, positions, slots, *pools)
    rotation = Rotation(table, positions)
    keys.index_copy_(0, slots, rotation.apply(k))
    values.index_copy_(0, slots, v)
    pairs = ((found, rotation.apply(q)), (pools[0], keys), (pools[1], values))
    return max(float((one - other).abs().max()) for one, other in pairs)


def _gate_error(kernels: CardKernels, device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(1)
    both = (3 * torch.rand((ROWS, 2 * WIDTH), generator=generator) - 1.5).to(dtype).to(device)
    gate, up = both.chunk(2, dim=-1)
    return float((kernels.gated(both) - F.silu(gate) * up).abs().max())


def _norm_error(kernels: CardKernels, device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(2)
    x, weight = (
        torch.rand(shape, generator=generator).to(dtype).to(device)
        for shape in ((ROWS, WIDTH), (WIDTH,))
    )
    expected = F.rms_norm(x, (WIDTH,), weight, EPS)
    return float((kernels.rms_norm(x, weight, EPS) - expected).abs().max())
