"""Draws from whole rows of weights over the vocabulary.

On a CPU they are made by torch's operations, on a GPU by one kernel where Triton is there and makes
the same draws.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from specserve.errors import first_line
from specserve.sampling.distribution import sample
from specserve.sampling.noise import Purpose, exponential, row_keys, rows_per_chunk

log = logging.getLogger(__name__)

DrawRows = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""See `draw_from_rows`."""
TRIAL_ROWS, TRIAL_VOCAB = 16, 5000


def draw_from_rows(weights: Tensor, keys: Tensor, rows: Tensor | None = None) -> Tensor:  # [n]
    """Return a draw from each of these rows, None: from every one.

    weights [rows, vocab], keys [n, 2]. The weights of a row need not sum to 1.
    """
    kernel = None if weights.is_cpu else draw_kernel_of(weights.device)
    return (_draw_by_torch if kernel is None else kernel)(weights, keys, rows)


def _draw_by_torch(weights: Tensor, keys: Tensor, rows: Tensor | None) -> Tensor:
    vocabulary = torch.arange(weights.shape[-1], dtype=torch.int32, device=weights.device)
    step = rows_per_chunk(weights)
    tokens = []
    for first in range(0, len(keys), step):
        part = slice(first, first + step)
        some = weights[part] if rows is None else weights[rows[part]]
        tokens.append(sample(some, exponential(keys[part], vocabulary)))
    return torch.cat(tokens)


@cache
def draw_kernel_of(device: torch.device) -> DrawRows | None:
    """Return the kernel for a GPU, once it has drawn what torch draws of a small batch."""
    try:
        from specserve.sampling.triton_draw import draw_rows
    except ImportError as error:
        log.info("Draws by torch's operations: %s", error)
        return None
    weights = torch.randn(
        TRIAL_ROWS, TRIAL_VOCAB, generator=torch.Generator().manual_seed(0)
    ).softmax(-1)
    weights[1], weights[2], weights[2, -1] = 0, 0, 1  # nothing to draw; one token only
    places = np.arange(TRIAL_ROWS)
    rows, keys = (
        torch.from_numpy(places[::-1].copy()),
        row_keys(range(TRIAL_ROWS), [5], places, Purpose.NEXT),
    )
    expected = _draw_by_torch(weights, keys, rows)
    try:
        found = draw_rows(weights.to(device), keys.to(device), rows.to(device))
    except Exception as error:  # compilers and drivers raise whatever they like
        log.warning("Draws by torch's operations: Triton fails: %s", first_line(error))
        return None
    if not torch.equal(found.cpu(), expected):
        log.warning("Draws by torch's operations: Triton's kernel draws other tokens")
        return None
    return draw_rows
