"""Draft tokens of a batch with their draft distributions, padded to one width.

The ragged shape of a round ends here. It knows tensors, no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.transfers import to_device
from specserve.types import SparseDistribution


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Draft tokens and draft distributions q of a batch, one row for each sequence.

    Column j belongs to draft token j of a sequence. The column past its last draft token has no
    token, and q is 0 there. Sequence i owns lengths[i] + 1 consecutive rows of p: one for each
    draft token and one more. The width is the largest such number.
    """

    tokens: Tensor  # [seqs, width] int64; padding is 0
    lengths: Tensor  # [seqs] int64
    rows: Tensor  # [seqs, width] int64: the row of p; padding repeats the last
    q_ids: Tensor  # [seqs, width, support] int64; padding is 0, with probability 0
    q_probs: Tensor  # [seqs, width, support]
    lenience: Tensor  # [seqs, 1]; the l of `lenient`, which alone uses it
    valid: Tensor  # [seqs, width] bool: there is a draft token
    # [seqs] the same as `lengths`, on the host
    host_lengths: NDArray[np.int64] = field(kw_only=True)

    @classmethod
    def from_tokens(
        cls,
        tokens: Sequence[Sequence[int]],
        q: Sequence[SparseDistribution | None],
        *,
        lenience: Sequence[float] | None = None,
        device: torch.device | str = "cpu",
    ) -> DraftBatch:
        """Pad each sequence's draft tokens and their q (None: q is one-hot)."""
        lengths = np.array([len(row) for row in tokens], dtype=np.int64)
        columns = np.arange(lengths.max(initial=0) + 1)
        valid = columns < lengths[:, None]
        flat = np.array([token for row in tokens for token in row], dtype=np.int64)
        padded = np.zeros(valid.shape, dtype=np.int64)
        padded[valid] = flat
        ids, probs = supports(flat, lengths, q)
        q_ids = np.zeros((*valid.shape, ids.shape[-1]), dtype=np.int64)
        q_probs = np.zeros(q_ids.shape, dtype=np.float32)
        q_ids[valid], q_probs[valid] = ids, probs
        first_rows = np.cumsum(lengths + 1) - lengths - 1
        l_factor = (
            np.ones(len(lengths), np.float32)
            if lenience is None
            else np.array(lenience, dtype=np.float32)
        )
        arrays = (
            padded,
            lengths,
            first_rows[:, None] + np.minimum(columns, lengths[:, None]),
            q_ids,
            q_probs,
            l_factor[:, None],
            valid,
        )
        return cls(*(to_device(array, device) for array in arrays), host_lengths=lengths)

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def cells(self) -> Tensor:
        """Return the number of each cell of [seqs, width] that has a row of p, [rows]."""
        has_row = np.arange(self.width) <= self.host_lengths[:, None]
        return to_device(np.flatnonzero(has_row), self.tokens.device)

    def select(self, index: NDArray[np.int64]) -> DraftBatch:
        """Return some of the sequences, on the same rows of the same p."""
        where = to_device(index, self.tokens.device)
        return DraftBatch(
            tokens=self.tokens[where],
            lengths=self.lengths[where],
            rows=self.rows[where],
            q_ids=self.q_ids[where],
            q_probs=self.q_probs[where],
            lenience=self.lenience[where],
            valid=self.valid[where],
            host_lengths=self.host_lengths[index],
        )

    def p_at_tokens(self, p: Tensor) -> Tensor:
        """Return p of each draft token, [seqs, width]."""
        return p[self.rows, self.tokens]

    def p_at_support(self, p: Tensor) -> Tensor:
        """Return p on the support of q, [seqs, width, support]."""
        return p[self.rows[:, :, None], self.q_ids]

    def q_at_tokens(self) -> Tensor:
        """Return q of each draft token, [seqs, width].

        Padding repeats ids with probability 0, which changes no sum.
        """
        return torch.where(self.q_ids == self.tokens[:, :, None], self.q_probs, 0).sum(-1)


def supports(
    flat: NDArray[np.int64], lengths: NDArray[np.int64], q: Sequence[SparseDistribution | None]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return ids and probs of q on one support width, both [draft tokens, support].

    `flat` holds the draft tokens of all sequences. Where q is None, it is one-hot on them. So it is
    where probabilities are not finite, as of a broken draft: whatever a token is, it may be
    verified as a certain one.
    """
    given = [rows for rows in q if rows is not None]
    width = max((rows.ids.shape[1] for rows in given), default=1)
    ids = np.repeat(flat[:, None], width, axis=1)
    probs = np.zeros(ids.shape, dtype=np.float32)
    if len(given) < len(q):
        probs[:, 0] = 1
    if given:
        sampled = np.repeat([rows is not None for rows in q], lengths)
        ids[sampled] = np.concatenate([_pad_support(rows.ids, width) for rows in given])
        probs[sampled] = np.concatenate([_pad_support(rows.probs, width) for rows in given])
    if not np.isfinite(probs.sum()):
        broken = ~np.isfinite(probs).all(1)
        ids[broken], probs[broken] = flat[broken, None], 0
        probs[broken, 0] = 1
    return ids, probs


def _pad_support(rows: NDArray[Any], width: int) -> NDArray[Any]:
    missing = width - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, missing))) if missing else rows
