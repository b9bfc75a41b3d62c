"""Penalties of tokens that occurred before: repetition, presence, frequency; all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.transfers import to_device
from specserve.types import Warp

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class History:
    """Tokens that the penalties of one sequence count, and that its rule looks at.

    Its last row counts all of `drafts`, the row before it all but the last, and so on.
    """

    tokens: Ints  # committed, with the prompt
    prompt_length: int
    drafts: tuple[int, ...] = ()


Adjustment = tuple[int, int, Warp, "History | None"]
"""First row, row past the last, warp and, for penalties or a rule, history of one sequence."""


def adjustments_of(
    warps: Sequence[Warp], num_rows: Sequence[int], histories: Sequence[History | None]
) -> list[Adjustment]:
    """Return first row, row past the last, warp and history of each sequence with changed logits.

    These are the sequences with penalties, bias or a rule; with bias alone, the history is None.
    """
    found = []
    stop = 0
    for warp, rows, history in zip(warps, num_rows, histories, strict=True):
        start, stop = stop, stop + rows
        if warp.depends_on_ids:
            assert not warp.needs_history or history is not None, "a warp lacks its history"
            found.append((start, stop, warp, history if warp.needs_history else None))
    return found


class PenaltyCells:
    """Tokens that occurred before each row with penalties, and how often in the text, on a CPU.

    A cell is a row and a token in it, as row * vocab + token. Only the tokens that occurred have
    one: there, a few hundred cells are cheaper than whole rows.
    """

    def __init__(self, adjustments: Sequence[Adjustment], like: Tensor) -> None:
        vocab = self._vocab = like.shape[-1]
        given, num_rows, self._rows = _rows_with_penalties(adjustments)
        self._penalties = _penalties_of(given, num_rows)
        texts = [history.tokens for _, history in given]
        lengths = np.array([len(text) for text in texts])
        prompts = np.array([history.prompt_length for _, history in given])
        is_generated = _ranges(np.zeros_like(lengths), lengths) >= prompts.repeat(lengths)
        # First once for each sequence, then for each of its rows.
        tokens = np.concatenate(texts) + np.arange(len(given)).repeat(lengths) * vocab
        found, times = _merged(tokens, is_generated)
        sizes = np.bincount(found // vocab, minlength=len(given))
        owners = np.arange(len(given)).repeat(num_rows)
        of_rows = _ranges((sizes.cumsum() - sizes)[owners], sizes[owners])
        rows = np.arange(len(owners))
        cells = found[of_rows] % vocab + rows.repeat(sizes[owners]) * vocab
        drafts = _drafts_before(given, num_rows)
        drafted = np.concatenate(drafts) + rows.repeat([len(row) for row in drafts]) * vocab
        self._cells, self._times = _with_drafts(cells, times[of_rows], drafted)

    def apply(self, logits: Tensor, drawn: Tensor | None) -> None:
        """Apply the penalties in place, counting tokens `drawn` [rows, n] since."""
        cells, times = self._cells, self._times
        if drawn is not None:
            newest = np.arange(len(self._rows))[:, None] * self._vocab + drawn.numpy()[self._rows]
            cells, times = _with_drafts(cells, times, newest.ravel())
        rows, tokens = np.divmod(cells, self._vocab)
        at = torch.from_numpy(self._rows[rows]), torch.from_numpy(tokens)
        penalties = torch.from_numpy(self._penalties[rows]).unbind(1)
        times_generated = torch.from_numpy(times.astype(np.float32))
        logits[at] = _penalised(logits[at], times_generated, *penalties)


def _with_drafts(cells: Ints, times: Ints, drafted: Ints) -> tuple[Ints, Ints]:
    """Return cells and times with drafts added, each of which occurs once more."""
    if not len(drafted):
        return cells, times
    both = np.concatenate([cells, drafted])
    return _merged(both, np.concatenate([times, np.ones_like(drafted)]))


def _merged(cells: Ints, times: NDArray[Any]) -> tuple[Ints, Ints]:
    """Return the different cells in order, with the sums of their times."""
    found, place = np.unique(cells, return_inverse=True)
    return found, np.bincount(place, times, minlength=len(found)).astype(np.int64)


def _penalised(
    x: Tensor,
    times_generated: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Return the logits of tokens that occurred.

    Repetition counts prompt and text; presence and frequency count the text alone.
    """
    x = torch.where(x < 0, x * repetition, x / repetition)
    return x - presence * (times_generated > 0) - frequency * times_generated


class PenaltyCounts:
    """How often each token occurred before each row with penalties, on a GPU.

    There, counts of the whole vocabulary are cheaper than a wait for the tokens just drawn.
    """

    def __init__(self, adjustments: Sequence[Adjustment], like: Tensor) -> None:
        vocab, device = like.shape[-1], like.device
        given, num_rows, rows = _rows_with_penalties(adjustments)
        texts = _padded([history.tokens for _, history in given], vocab)
        prompts = np.array([history.prompt_length for _, history in given])
        is_generated = np.arange(texts.shape[1]) >= prompts[:, None]
        drafts = _padded(_drafts_before(given, num_rows), vocab)
        columns = to_device(_penalties_of(given, num_rows), device)
        self._penalties = columns[:, :, None].unbind(1)  # [rows, 1] each
        self._rows = to_device(rows, device)
        owners = to_device(np.repeat(np.arange(len(given)), num_rows), device)
        ids = to_device(texts, device)
        # The column past the vocabulary counts the padding.
        zeros = torch.zeros(len(given), vocab + 1, dtype=torch.int32, device=device)
        ones = torch.ones_like(ids, dtype=torch.int32)
        of_drafts = to_device(drafts, device)
        self._seen = _plus(zeros.scatter_add(1, ids, ones)[owners], of_drafts)
        flags = to_device(is_generated.astype(np.int32), device)
        self._generated = _plus(zeros.scatter_add(1, ids, flags)[owners], of_drafts)

    def apply(self, logits: Tensor, drawn: Tensor | None) -> None:
        """Apply the penalties in place, counting tokens `drawn` [rows, n] since."""
        seen, generated = self._seen, self._generated
        if drawn is not None:
            newest = drawn[self._rows]
            seen, generated = _plus(seen, newest), _plus(generated, newest)
        x, times_generated = logits[self._rows], generated[:, :-1].to(logits.dtype)
        penalised = _penalised(x, times_generated, *self._penalties)
        logits[self._rows] = torch.where(seen[:, :-1] > 0, penalised, x)


def _rows_with_penalties(
    adjustments: Sequence[Adjustment],
) -> tuple[list[tuple[Warp, History]], Ints, Ints]:
    """Return the sequences with penalties, the number of rows of each, and all of these rows."""
    given = [
        (first, last, warp, history)
        for first, last, warp, history in adjustments
        if history is not None and warp.has_penalties
    ]
    first, last = np.array([rows[:2] for rows in given]).T
    return [one[2:] for one in given], last - first, _ranges(first, last - first)


def _penalties_of(
    given: Sequence[tuple[Warp, History]], num_rows: Ints
) -> NDArray[np.float32]:  # [rows, 3]
    penalties = [
        (warp.repetition_penalty, warp.presence_penalty, warp.frequency_penalty)
        for warp, _ in given
    ]
    return np.array(penalties, np.float32).repeat(num_rows, axis=0)


def _drafts_before(given: Sequence[tuple[Warp, History]], num_rows: Ints) -> list[Ints]:
    """Return the drafts that each row counts."""
    return [
        np.array(history.drafts[: len(history.drafts) + 1 - left], dtype=np.int64)
        for (_, history), num in zip(given, num_rows.tolist(), strict=True)
        for left in range(num, 0, -1)
    ]


def _ranges(starts: Ints, sizes: Ints) -> Ints:
    """Return `sizes[i]` numbers from `starts[i]` on, for each i."""
    firsts = sizes.cumsum() - sizes
    ranges: Ints = np.arange(sizes.sum()) + (starts - firsts).repeat(sizes)
    return ranges


def _padded(texts: Sequence[Ints], padding: int) -> Ints:
    """Return texts of any lengths as rows of one array."""
    padded = np.full((len(texts), max(map(len, texts))), padding, dtype=np.int64)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    return padded


def _plus(counts: Tensor, ids: Tensor) -> Tensor:
    """Return counts [rows, vocab + 1] with one more for each of ids [rows, n]."""
    return counts.scatter_add(1, ids, torch.ones_like(ids, dtype=counts.dtype))
