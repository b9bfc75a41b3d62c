"""Penalties of tokens that occurred before: repetition, presence, frequency.

On the CPU sequence by sequence, for the tokens that occurred; on a GPU for all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.transfers import to_device
from specserve.types import Warp


@dataclass(frozen=True, slots=True)
class History:
    """Tokens that the penalties of one sequence count, and that its rule looks at.

    Its last row counts all of `drafts`, the row before it all but the last, and so on.
    """

    tokens: NDArray[np.int64]  # committed, with the prompt
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
        assert not warp.needs_history or history is not None, "penalties and rules need a history"
        if warp.depends_on_ids:
            found.append((start, stop, warp, history if warp.needs_history else None))
    return found


def apply_penalties(rows: Tensor, warp: Warp, history: History) -> None:
    """Apply the penalties in place to the tokens that occurred: [rows, vocab].

    Repetition counts prompt and text; presence and frequency count the text alone.
    """
    num_rows, vocab = rows.shape
    seen = np.bincount(history.tokens, minlength=vocab)
    generated = np.bincount(history.tokens[history.prompt_length :], minlength=vocab)
    drafts = np.array(history.drafts, dtype=np.int64)
    ids = np.union1d(np.flatnonzero(seen), drafts)  # [m]
    drafted = np.zeros((len(drafts) + 1, len(ids)), dtype=np.int64)
    np.cumsum(drafts[:, None] == ids, axis=0, out=drafted[1:])  # row j counts drafts[:j]
    drafted = drafted[len(drafted) - num_rows :]  # [rows, m]

    times_generated = to_device(generated[ids] + drafted, rows.device).to(rows.dtype)
    ever_seen = to_device(seen[ids] + drafted > 0, rows.device)
    columns = to_device(ids, rows.device)
    penalties = (warp.repetition_penalty, warp.presence_penalty, warp.frequency_penalty)
    rows[:, columns] = _penalised(rows[:, columns], ever_seen, times_generated, *penalties)


def _penalised(
    x: Tensor,
    ever_seen: Tensor,
    times_generated: Tensor,
    repetition: Tensor | float,
    presence: Tensor | float,
    frequency: Tensor | float,
) -> Tensor:
    x = torch.where(ever_seen, torch.where(x < 0, x * repetition, x / repetition), x)
    return x - presence * (times_generated > 0) - frequency * times_generated


class PenaltyCounts:
    """How often each token occurred before each row with penalties, on a GPU.

    There, counts of the whole vocabulary are cheaper than a wait for the tokens just drawn.
    """

    def __init__(self, adjustments: Sequence[Adjustment], like: Tensor) -> None:
        vocab, device = like.shape[-1], like.device
        given = [
            (first, last, warp, history)
            for first, last, warp, history in adjustments
            if history is not None and warp.has_penalties
        ]
        num_rows = [last - first for first, last, _, _ in given]
        rows = np.concatenate([np.arange(first, last) for first, last, _, _ in given])
        texts = _padded([history.tokens for *_, history in given], vocab)
        prompts = np.array([history.prompt_length for *_, history in given])
        is_generated = np.arange(texts.shape[1]) >= prompts[:, None]
        # Row j of a sequence counts the drafts before it.
        drafts = _padded(
            [
                np.array(history.drafts[: len(history.drafts) + 1 - left], dtype=np.int64)
                for (*_, history), num in zip(given, num_rows, strict=True)
                for left in range(num, 0, -1)
            ],
            vocab,
        )
        penalties = [
            (warp.repetition_penalty, warp.presence_penalty, warp.frequency_penalty)
            for *_, warp, _ in given
        ]
        columns = to_device(np.array(penalties, np.float32).repeat(num_rows, axis=0), device)
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
        times_generated = generated[:, :-1].to(logits.dtype)
        logits[self._rows] = _penalised(
            logits[self._rows], seen[:, :-1] > 0, times_generated, *self._penalties
        )


def _padded(texts: Sequence[NDArray[np.int64]], padding: int) -> NDArray[np.int64]:
    """Return texts of any lengths as rows of one array."""
    padded = np.full((len(texts), max(map(len, texts))), padding, dtype=np.int64)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    return padded


def _plus(counts: Tensor, ids: Tensor) -> Tensor:
    """Return counts [rows, vocab + 1] with one more for each of ids [rows, n]."""
    return counts.scatter_add(1, ids, torch.ones_like(ids, dtype=counts.dtype))
