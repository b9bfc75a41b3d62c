"""Which tokens may stand in some rows of logits: packed bits, as grammars say them, and what they make of the logits. Knows no grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Allowed:
    """Rows without bits may have any token; ids past the bits may stand nowhere in the others."""

    rows: NDArray[np.int64]  # [constrained], rising
    bits: NDArray[np.int32]  # [constrained, words], the lowest id in the lowest bit

    @classmethod
    def of(cls, rows: Sequence[tuple[int, NDArray[np.int32]]]) -> Allowed:
        """Of rows with the bits of each."""
        return cls(
            np.array([row for row, _ in rows], np.int64),
            np.array([bits for _, bits in rows], np.int32),
        )

    def applied(self, logits: Tensor) -> Tensor:  # [rows, vocab]
        """A copy with -inf for whatever is forbidden: what is left of a row is then renormalised by whoever makes a distribution of it."""
        if not len(self.rows):
            return logits
        forbidden = _forbidden(self.bits, logits.shape[-1], logits.device)
        if len(self.rows) == len(logits):
            return logits.masked_fill(forbidden, -torch.inf)
        rows = torch.from_numpy(self.rows).to(logits.device)
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
    packed = torch.from_numpy(bits).to(device)  # an eighth of a byte for each id travels
    places = torch.arange(32, dtype=torch.int32, device=device)
    return packed[:, :, None].bitwise_right_shift(places).bitwise_and_(1).flatten(1)[:, :vocab] == 0
