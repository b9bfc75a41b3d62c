"""Hidden states between the layers of a target, for a drafter that reads them, here or elsewhere.

Knows no drafter and no sequences but their rows in a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specserve.hidden_states import HiddenStates


@dataclass(frozen=True, slots=True, eq=False)
class HiddenRows:
    """Hidden states of consecutive positions of one sequence, from `start` on."""

    seq_id: int
    start: int
    rows: Tensor  # [positions, width]

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)

    def between(self, start: int, stop: int | None = None) -> HiddenRows:
        """Return the part that lies in these positions, which may be empty."""
        first = min(max(start, self.start), self.stop)
        last = self.stop if stop is None else max(min(stop, self.stop), first)
        return HiddenRows(self.seq_id, first, self.rows[first - self.start : last - self.start])


def pack_hidden(hidden: Sequence[HiddenRows]) -> list[HiddenStates]:
    """Return the bytes of these rows, after one copy from the device."""
    hidden = [each for each in hidden if len(each.rows)]
    if not hidden:
        return []
    rows = torch.cat([each.rows for each in hidden])
    width, dtype = rows.shape[1] * rows.element_size(), str(rows.dtype).removeprefix("torch.")
    host = rows.contiguous().view(torch.uint8).cpu()
    data, packed, first = memoryview(host.numpy().tobytes()), [], 0
    for each in hidden:
        stop = first + len(each.rows) * width
        packed.append(
            HiddenStates(each.seq_id, each.start, len(each.rows), dtype, data[first:stop])
        )
        first = stop
    return packed


def unpack_hidden(hidden: Sequence[HiddenStates]) -> list[HiddenRows]:
    """Return the rows of these bytes, each in a copy of its own."""
    return [
        HiddenRows(
            each.seq_id,
            each.start,
            torch.frombuffer(bytearray(each.data), dtype=getattr(torch, each.dtype)).view(
                each.num_positions, -1
            ),
        )
        for each in hidden
    ]


class HiddenTaps:
    """The inputs of some layers in the latest pass, joined for each row.

    Layer i stands for the input of layer i, which is the embedding for 0 and the last layer's
    output for the number of layers.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.rows: Tensor | None = None  # [rows, taps * hidden] of the latest pass
        self._found: dict[int, Tensor] = {}

    def add(self, layer: int, hidden: Tensor) -> None:  # [rows, hidden]
        """Copy the input of a layer if it is tapped; compiled layers overwrite it."""
        if layer in self.layers:
            self._found[layer] = hidden.clone()
        if len(self._found) == len(set(self.layers)):
            self.rows = torch.cat([self._found[one] for one in self.layers], dim=-1)
            self._found.clear()

    def take(self) -> Tensor:
        """Return the rows of the latest pass, which are dropped here."""
        rows, self.rows = self.rows, None
        assert rows is not None, "no pass has run through the taps"
        return rows
