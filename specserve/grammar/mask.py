"""Token masks: packed bits, as grammars produce them, applied to rows of logits.

It knows no grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.transfers import to_device


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Tokens allowed in some rows of logits.

    Rows that are not listed may have any token. In the others, ids past the bits are forbidden.
    """

    rows: NDArray[np.int64]  # [constrained], rising
    bits: NDArray[np.int32]  # [constrained, words], the lowest id in the lowest bit

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[int, NDArray[np.int32]]]) -> TokenMask:
        """Make a mask from numbers of rows with the bits of each."""
        return cls(
            np.array([row for row, _ in rows], np.int64),
            np.array([bits for _, bits in rows], np.int32),
        )

    def apply(self, logits: Tensor) -> Tensor:  # [rows, vocab]
        """Return a copy with -inf for every forbidden token.

        The softmax over such a row renormalises what is allowed.
        """
        if not len(self.rows):
            return logits
        forbidden = _forbidden(self.bits, logits.shape[-1], logits.device)
        if len(self.rows) == len(logits):
            return logits.masked_fill(forbidden, -torch.inf)
        rows = to_device(self.rows, logits.device)
        return logits.index_copy(
            0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf)
        )


def _forbidden(
    bits: NDArray[np.int32], vocab: int, device: torch.device
) -> Tensor:  # [constrained, vocab] bool
    lacking = -(-vocab // 32) - bits.shape[1]
    if lacking > 0:
        bits = np.pad(bits, ((0, 0), (0, lacking)))
    if device.type == "cpu":
        return torch.from_numpy(
            np.unpackbits(bits.view(np.uint8), axis=1, count=vocab, bitorder="little") == 0
        )
    packed = to_device(bits, device)  # copies an eighth of a byte for each id
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return packed[:, :, None].bitwise_right_shift(shifts).bitwise_and_(1).flatten(1)[:, :vocab] == 0
