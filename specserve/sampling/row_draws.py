"""Draws from whole rows of weights over the vocabulary.

They are made by one kernel where it makes the same draws as torch's operations: on a CPU by machine
code, on a GPU by Triton's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.errors import first_line
from specserve.sampling.distribution import WarpBatch, argmax, sample
from specserve.sampling.few_tokens import FewTokens
from specserve.sampling.noise import Purpose, exponential, row_keys, rows_per_chunk

log = logging.getLogger(__name__)

DrawRows = Callable[[Tensor, Tensor, Tensor | None, int], tuple[Tensor, Tensor]]
"""Returns scores and tokens: see `best_of_rows`."""
TRIAL_ROWS, TRIAL_VOCAB = 16, 5000


def draw_by_logits(
    warps: WarpBatch, logits: Tensor, keys: Tensor, drawn: Tensor | None = None
) -> Tensor:  # [rows]
    """Return a draw for each row of logits [rows, vocab], keys [rows, 2].

    `drawn` is as `WarpBatch.adjust` has it.
    """
    found = warps.few_weights(logits, drawn)
    if found is None:
        as_weights = np.full(len(logits), True)
        return draw_from_rows(warps.probabilities(logits, drawn, as_weights=as_weights), keys)
    few, weights = found
    return draw_among_few(few, few.of_table(weights), keys)


def draw_from_rows(weights: Tensor, keys: Tensor, rows: Tensor | None = None) -> Tensor:  # [n]
    """Return a draw from each of these rows, None: from every one.

    weights [rows, vocab], keys [n, 2]. The weights of a row need not sum to 1.
    """
    kernel = draw_kernel_of(weights.device)
    if kernel is None:
        return torch.cat([sample(*part) for part in _noisy_parts(weights, keys, rows, 0)])
    return kernel(weights, keys, rows, 0)[1]


def draw_among_few(
    few: FewTokens, weights: NDArray[np.float32], keys: Tensor
) -> Tensor:  # [chosen], [rows, 2] -> [rows]
    """Return a draw from each row, all of whose tokens with a weight are among the few."""
    ids = torch.from_numpy(few.ids)[:, None]
    noise = exponential(keys[torch.from_numpy(few.rows)], ids)[:, 0].numpy()
    scores = few.table(weights / noise, 0)
    tokens = np.zeros(few.shape, dtype=np.int64)
    tokens[few.rows, few.columns] = few.ids
    return torch.from_numpy(tokens).gather(1, argmax(scores)[:, None])[:, 0]


def best_of_rows(
    weights: Tensor, keys: Tensor, *, first_id: int = 0
) -> tuple[Tensor, Tensor]:  # both [rows]
    """Return the best score of each row of weights, and the token that has it.

    Column j belongs to token `first_id` + j. Of parts of one row, the one with the best score has
    the token that is drawn from the whole row; of a tie, the first.
    """
    kernel = draw_kernel_of(weights.device)
    return (_draw_by_torch if kernel is None else kernel)(weights, keys, None, first_id)


def _draw_by_torch(
    weights: Tensor, keys: Tensor, rows: Tensor | None, first_id: int
) -> tuple[Tensor, Tensor]:
    scores, tokens = [], []
    for some, noise in _noisy_parts(weights, keys, rows, first_id):
        noisy = some / noise
        places = argmax(noisy)
        scores.append(noisy.gather(1, places[:, None])[:, 0])
        tokens.append(places + first_id)
    return torch.cat(scores), torch.cat(tokens)


def _noisy_parts(
    weights: Tensor, keys: Tensor, rows: Tensor | None, first_id: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield weights and noise of some rows at a time."""
    width = weights.shape[-1]
    ids = torch.arange(first_id, first_id + width, dtype=torch.int32, device=weights.device)
    step = rows_per_chunk(weights)
    for first in range(0, len(keys), step):
        part = slice(first, first + step)
        some = weights[part] if rows is None else weights[rows[part]]
        yield some, exponential(keys[part], ids)


@cache
def draw_kernel_of(device: torch.device) -> DrawRows | None:
    """Return the kernel for a device, once it has drawn what torch draws of a small batch."""
    try:
        draw_rows = _load_kernel(device)
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
    _, expected = _draw_by_torch(weights, keys, rows, 7)
    try:
        _, found = draw_rows(weights.to(device), keys.to(device), rows.to(device), 7)
    except Exception as error:  # compilers and drivers raise whatever they like
        log.warning("Draws by torch's operations: their kernel fails: %s", first_line(error))
        return None
    if not torch.equal(found.cpu(), expected):
        log.warning("Draws by torch's operations: their kernel draws other tokens")
        return None
    return draw_rows


def _load_kernel(device: torch.device) -> DrawRows:
    """Return the kernel; raise ImportError where what makes it is not installed."""
    if device.type == "cpu":
        from specserve.sampling import compiled_draw

        return compiled_draw.draw_rows
    from specserve.sampling import triton_draw

    return triton_draw.draw_rows
