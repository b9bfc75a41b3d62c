"""Top-k and top-p: by a sort, or by FlashInfer's kernels, which need none.

A sort of 256 rows over 128,000 tokens moves all of them several times; FlashInfer looks for the
threshold instead. Ties at the threshold may then be kept. FlashInfer is an optional dependency.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve import flashinfer_kernels
from specserve.transfers import to_device

log = logging.getLogger(__name__)

SORTED_WIDTH = 4096
"""Width of rows up to which a sort is as cheap."""
COMPILE = "`python -m specserve.flashinfer_kernels --only sampling`"
MAX_DIFFERING = 4
"""Tokens of a trial at the edge, which another order of adding may keep or not."""
Renormalise = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns p [rows, vocab] under top-k [rows] and top-p [rows], all of them on a card."""


def top_k_top_p(x: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
    """Return each row with -inf for the tokens that top-k and then top-p exclude.

    x has its maximum at 0.
    """
    renormalise = None if x.is_cpu or x.shape[-1] <= SORTED_WIDTH else renormaliser_of(x.device)
    if renormalise is None:
        return by_sorting(x, top_k, top_p)
    return x.masked_fill(~_kept(renormalise, x, top_k, top_p), -torch.inf)


def by_sorting(x: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
    """Return each row with -inf for the tokens that top-k and then top-p exclude.

    x has its maximum at 0. Top-k keeps ties, as transformers does. Top-p keeps the smallest set
    that reaches its mass, the lowest ids of a tie.
    """
    vocab = x.shape[-1]
    ranked = _descending(x)
    last = to_device(np.where(top_k > 0, top_k.clip(max=vocab), vocab) - 1, x.device)
    mass = torch.where(ranked >= ranked.gather(1, last[:, None]), ranked.exp(), 0).double()
    reached = mass.cumsum(-1)
    before = reached - mass  # [rows, vocab]: of the likelier ones
    wanted = to_device(np.where(top_p < 1, top_p, np.inf)[:, None], x.device) * reached[:, -1:]
    num_kept = ((before < wanted) & (mass > 0)).sum(-1, keepdim=True).clamp_(min=1)
    cutoff = ranked.gather(1, num_kept - 1)
    above, tied = x > cutoff, x == cutoff
    num_tied = num_kept - above.sum(-1, keepdim=True)
    return x.masked_fill(~(above | (tied & (tied.cumsum(-1) <= num_tied))), -torch.inf)


def _descending(x: Tensor) -> Tensor:
    """Return each row's values in falling order.

    numpy's sort is vectorised; torch's carries the indices along and takes 30 times as long.
    """
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)
    return x.sort(dim=-1, descending=True).values


def _kept(
    renormalise: Renormalise, x: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]
) -> Tensor:
    """Return which tokens of logits x are kept, [rows, vocab] bool."""
    vocab = x.shape[-1]
    most = np.where(top_k > 0, top_k.clip(max=vocab), vocab).astype(np.int32)
    mass = to_device(top_p.astype(np.float32), x.device)
    return renormalise(torch.softmax(x, -1), to_device(most, x.device), mass) > 0


@cache
def renormaliser_of(device: torch.device) -> Renormalise | None:
    """Return FlashInfer's way on a card, once it has kept what the sort keeps of a small batch."""
    flashinfer_kernels.prepare()
    try:
        from flashinfer.jit.sampling import gen_sampling_module
        from flashinfer.sampling import top_k_renorm_probs, top_p_renorm_probs
    except Exception as error:  # a build for another torch raises whatever it likes
        log.info("Top-k and top-p by sorting; FlashInfer: %s: %s", type(error).__name__, error)
        return None
    if not gen_sampling_module().is_compiled:  # it takes minutes, and most requests do not need it
        log.info("Top-k and top-p by sorting, until %s compiles FlashInfer's kernels", COMPILE)
        return None

    def renormalise(p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        kept: Tensor = top_p_renorm_probs(top_k_renorm_probs(p, top_k), top_p)
        return kept

    logits = 3 * torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    x = to_device((logits - logits.amax(-1, keepdim=True)).numpy(), device)
    top_k, top_p = np.array([0, 40, 0, 300]), np.array([0.9, 1.0, 0.3, 0.8])
    try:
        kept = _kept(renormalise, x, top_k, top_p)
    except Exception as error:  # compilers, drivers and kernels raise whatever they like
        log.warning("Top-k and top-p by sorting: FlashInfer fails: %s", error)
        return None
    differing = int((kept != (by_sorting(x, top_k, top_p) > -torch.inf)).sum())
    if differing > MAX_DIFFERING:
        log.warning("Top-k and top-p by sorting: FlashInfer keeps %d other tokens", differing)
        return None
    return renormalise
