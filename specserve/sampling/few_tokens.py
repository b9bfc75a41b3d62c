"""Some tokens of each row of a batch, side by side: what is left of a large vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FewTokens:
    """The chosen tokens of rows on a CPU, by rising ids, and their places in a narrow table."""

    rows: NDArray[np.int64]  # [chosen], and so are the next two
    ids: NDArray[np.int64]
    columns: NDArray[np.int64]  # in the table
    shape: tuple[int, int]  # of the table

    @classmethod
    def from_mask(cls, chosen: NDArray[np.bool_]) -> FewTokens:
        """Return the tokens that a mask [rows, vocab] chooses."""
        num_rows, vocab = chosen.shape
        rows, ids = np.divmod(np.flatnonzero(chosen), vocab)
        counts = np.bincount(rows, minlength=num_rows)
        columns = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
        return cls(rows, ids, columns, (num_rows, max(1, int(counts.max(initial=0)))))

    def table(self, values: NDArray[np.float32], fill: float) -> Tensor:
        """Return a value of each chosen token [chosen] as [rows, columns], filled up."""
        table = np.full(self.shape, fill, dtype=np.float32)
        table[self.rows, self.columns] = values
        return torch.from_numpy(table)

    def of_table(self, table: Tensor) -> NDArray[np.float32]:
        """Return the value of each chosen token in such a table."""
        values: NDArray[np.float32] = table.numpy()[self.rows, self.columns]
        return values
