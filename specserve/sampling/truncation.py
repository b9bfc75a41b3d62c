"""Top-k and top-p: by a sort, on CPUs of the few tokens that can be kept, or by FlashInfer.

A sort of 256 rows over 128,000 tokens moves all of them several times; FlashInfer's kernels look
for the threshold instead. Ties at the threshold may then be kept. FlashInfer is an optional
dependency.
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
from specserve.sampling.few_tokens import FewTokens
from specserve.transfers import to_device

log = logging.getLogger(__name__)

SORTED_WIDTH = 4096
"""Width of rows up to which a sort is as cheap."""
SELECTED = 1024
"""Largest top-k whose tokens are selected before they are sorted."""
PARTS = 4
"""Parts of a row for each token of its top-k: with more, fewer tokens are selected."""
SUMMED_ROWS = 8
"""Rows whose weights are added up at once: they stay in the cache."""
SLACK = 1e-3
"""Distance from a logit's lower bound that leaves room for rounding."""
COMPILE = "`python -m specserve.flashinfer_kernels --only sampling`"
MAX_DIFFERING = 4
"""Tokens of a trial at the edge, which another order of adding may keep or not."""
Renormalise = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns p [rows, vocab] under top-k [rows] and top-p [rows], all of them on a card."""


def top_k_top_p(x: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
    """Return each row with -inf for the tokens that top-k and then top-p exclude.

    x has its maximum at 0.
    """
    if x.shape[-1] <= SORTED_WIDTH:
        return by_sorting(x, top_k, top_p)
    if x.is_cpu:
        return by_selecting(x, top_k, top_p)
    renormalise = renormaliser_of(x.device)
    if renormalise is None:
        return by_sorting(x, top_k, top_p)
    return x.masked_fill(~_kept(renormalise, x, top_k, top_p), -torch.inf)


def by_selecting(x: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
    """Return what `by_sorting` returns of rows on a CPU; tokens that cannot be kept are not sorted.

    Of 49,152 tokens a sort takes 1.0 ms a row, and of 151,936 3.8 ms.
    """
    few, kept = select(x, top_k, top_p)
    out = np.full(x.shape, -np.inf, dtype=np.float32)
    out[few.rows, few.ids] = few.of_table(kept)
    return torch.from_numpy(out)


def select(
    x: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]
) -> tuple[FewTokens, Tensor]:
    """Return the tokens of rows on a CPU that can be kept, and a table with -inf for the others."""
    mass = _whole_mass(x, top_k)
    few = FewTokens.from_mask(x.numpy() >= _lower_bounds(x, top_k, top_p, mass))
    table = few.table(x.numpy()[few.rows, few.ids], -np.inf)
    return few, by_sorting(table, top_k, top_p, torch.from_numpy(mass))


def _whole_mass(x: Tensor, top_k: NDArray[np.int64]) -> NDArray[np.float64]:  # [rows, 1]
    """Return the sum of each row's weights; 0 with a top-k, which leaves only some of them."""
    has_all = top_k <= 0
    mass = np.zeros((len(x), 1))
    if has_all.any():
        whole = x if has_all.all() else x[torch.from_numpy(has_all)]
        # numpy adds the numbers of a row in the same order whatever the other rows are.
        parts = [part.exp().double().numpy().sum(-1) for part in torch.split(whole, SUMMED_ROWS)]
        mass[has_all, 0] = np.concatenate(parts)
    return mass


def _lower_bounds(
    x: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64], mass: NDArray[np.float64]
) -> NDArray[np.float32]:  # [rows, 1]
    """Return a logit of each row below which no token is kept.

    With a top-k, that many parts of the row have a token above it. Without one, tokens with less
    than 1 - top-p of the mass, divided by their number, have less than that in all: those above
    suffice for top-p.
    """
    with np.errstate(divide="ignore"):
        bounds = np.log(mass[:, 0] * np.maximum(0, 1 - top_p) / x.shape[-1]) - SLACK
    is_few = (top_k > 0) & (top_k <= min(SELECTED, x.shape[-1]))
    if is_few.any():
        rows = x.numpy() if is_few.all() else x.numpy()[is_few]
        width = max(1, x.shape[-1] // (PARTS * int(top_k.max(where=is_few, initial=1))))
        highest = np.maximum.reduceat(rows, np.arange(0, x.shape[-1], width), axis=1)
        highest.sort(axis=1)
        bounds[is_few] = highest[np.arange(len(rows)), -top_k[is_few]]
    return bounds[:, None].astype(np.float32)


def by_sorting(
    x: Tensor,
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    mass_without_k: Tensor | None = None,
) -> Tensor:
    """Return each row with -inf for the tokens that top-k and then top-p exclude.

    x has its maximum at 0. Top-k keeps ties, as transformers does. Top-p keeps the smallest set
    that reaches its mass, the lowest ids of a tie. `mass_without_k` [rows, 1] is that of rows
    without top-k, if x lacks some of their tokens.
    """
    vocab = x.shape[-1]
    ranked = _descending(x)
    last = to_device(np.where(top_k > 0, top_k.clip(max=vocab), vocab) - 1, x.device)
    mass = torch.where(ranked >= ranked.gather(1, last[:, None]), ranked.exp(), 0).double()
    reached = mass.cumsum(-1)
    before = reached - mass  # [rows, vocab]: of the likelier ones
    whole = reached[:, -1:]
    if mass_without_k is not None:
        whole = torch.where(to_device(top_k[:, None] > 0, x.device), whole, mass_without_k)
    wanted = to_device(np.where(top_p < 1, top_p, np.inf)[:, None], x.device) * whole
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
