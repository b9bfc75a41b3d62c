"""The layout of a pass: which positions its rows have, which slots they write, and which sequences attend together.

Plain arithmetic on arrays, the same for every model. Knows pages and rows; no attention, no cache policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

DIRECT = 4096  # up to so many multiplications torch's own loops take a bf16 product over from oneDNN, and sum in another order
FEW_QUERIES = 32  # up to here sequences are batched together; longer runs (prompts) attend one sequence at a time
SMALL_CONTEXT = 8  # contexts up to 2**8 keys are all alike


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a layout must know of the cache and the model."""

    page_size: int
    kv_heads: int
    block: int  # keys that one product sums over; contexts are padded to whole blocks
    device: torch.device

    def context(self, length: int) -> int:
        return -(-length // self.block) * self.block

    def num_pages(self, length: int) -> int:
        return -(-self.context(length) // self.page_size)


@dataclass(frozen=True, slots=True)
class Writes:
    """What a pass writes: `counts[i]` tokens at `starts[i]`, into the pages of `table[i]`."""

    starts: Ints  # [seqs]
    counts: Ints  # [seqs]
    table: Ints  # [seqs, pages] wide enough for the longest context in whole blocks
    context: int | None = None  # round every context up to this length, for shapes that recur

    @property
    def lengths(self) -> Ints:
        return self.starts + self.counts


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of a group, as they were and as attention wants them."""

    table: Ints  # [seqs, pages]
    device_table: Tensor  # the same, for kernels that read pages where they lie
    gather: Tensor  # [seqs * kv_heads * context] into a pool seen as [slots * kv_heads, dim]


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that attend in one batched product: each has `queries` rows and `context` keys, padded at the end."""

    rows: Tensor | None  # [seqs * queries] the pass's row at each place, padding repeats a row; None: all rows in order
    valid: Tensor | None  # [n] the places that are no padding; None: all
    positions: Tensor  # [seqs, queries]
    pages: Pages
    seqs: int
    queries: int
    context: int  # a multiple of the block
    block: int
    rounded: bool = False  # padded up to a shape that recurs
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by window; layers share them within a pass

    def mask(self, window: int | None) -> Tensor:  # [seqs, 1, queries, 1, context], True where a key is out of sight
        if window not in self.masks:
            keys = torch.arange(self.context, device=self.positions.device)
            distance = self.positions[:, :, None] - keys  # [seqs, queries, context]
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            self.masks[window] = hidden[:, None, :, None, :]
        return self.masks[window]


@dataclass(frozen=True, slots=True)
class Layout:
    positions: Tensor  # [rows]
    slots: Tensor  # [rows]
    groups: tuple[Group, ...]


class Planner:
    """Lays passes out. Remembers the pages of the last one: those of a decoding batch seldom change from pass to pass."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._last: tuple[Pages, ...] = ()

    def lay_out(self, writes: Writes) -> Layout:
        even = len(writes.counts) == 1 or bool((writes.counts == writes.counts[0]).all())
        kinds = _kinds(writes) if writes.context is None and len(writes.counts) > 1 else None
        layout = self._even(writes) if even and (kinds is None or (kinds == kinds[0]).all()) else self._uneven(writes, kinds)
        self._last = tuple(group.pages for group in layout.groups)
        return layout

    def _even(self, writes: Writes) -> Layout:
        """All sequences write as many tokens and attend together: a decoding round, or a prompt alone."""
        size = self.geometry.page_size
        queries = int(writes.counts[0])
        positions = writes.starts[:, None] + np.arange(queries)  # [seqs, queries]
        slots = np.take_along_axis(writes.table, positions // size, axis=1) * size + positions % size
        own = self._tensor(positions)
        return Layout(own.view(-1), self._tensor(slots.reshape(-1)), (self._group(0, writes, own),))

    def _uneven(self, writes: Writes, kinds: Ints | None) -> Layout:
        starts, counts, size = writes.starts, writes.counts, self.geometry.page_size
        owner = np.repeat(np.arange(len(counts)), counts)  # [rows]
        firsts = np.cumsum(counts) - counts
        positions = np.arange(len(owner)) + (starts - firsts)[owner]
        slots = writes.table[owner, positions // size] * size + positions % size
        companies = [np.arange(len(counts))] if kinds is None else [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
        groups = []
        for index, members in enumerate(companies):
            columns = np.arange(counts[members].max())
            own = counts[members, None]
            places = np.minimum(columns, own - 1) + firsts[members, None]  # [seqs, queries], padding repeats the last
            part = Writes(starts[members], counts[members], writes.table[members], writes.context)
            ragged = bool((own != len(columns)).any())
            valid = self._tensor(np.flatnonzero(columns < own)) if ragged else None
            groups.append(self._group(index, part, self._tensor(positions[places]), rows=self._tensor(places.reshape(-1)), valid=valid))
        return Layout(self._tensor(positions), self._tensor(slots), tuple(groups))

    def _group(self, index: int, writes: Writes, positions: Tensor, *, rows: Tensor | None = None, valid: Tensor | None = None) -> Group:
        seqs, queries = positions.shape
        context = writes.context or self.geometry.context(int(writes.lengths.max()))
        pages = self._pages(index, writes.table[:, : -(-context // self.geometry.page_size)], context)
        rounded = writes.context is not None
        return Group(rows, valid, positions, pages, seqs, queries, context, self.geometry.block, rounded)

    def _pages(self, index: int, table: Ints, context: int) -> Pages:
        if index < len(self._last) and np.array_equal(self._last[index].table, table):
            return self._last[index]
        size, kv_heads = self.geometry.page_size, self.geometry.kv_heads
        keys = (table[:, :, None] * size + np.arange(size)).reshape(len(table), -1)[:, :context]  # [seqs, context]
        gather = keys[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]  # [seqs, kv_heads, context]
        return Pages(table, self._tensor(np.ascontiguousarray(table)), self._tensor(gather.reshape(-1)))

    def _tensor(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self.geometry.device)


def key_block(width: int) -> int:
    """How many keys one product sums over: always the same number, and enough that even one query's product is oneDNN's.

    `width` is that of the narrower of all heads' keys and all heads' values together.
    """
    block = 256
    while block * width <= DIRECT:
        block *= 2
    return block


def _kinds(writes: Writes) -> Ints:
    """Who attends together: short runs whose contexts are within a factor of two, so that padding never doubles the work."""
    size = np.maximum(np.ceil(np.log2(np.maximum(writes.lengths, 1))), SMALL_CONTEXT).astype(np.int64)
    return np.where(writes.counts <= FEW_QUERIES, size, -1 - np.arange(len(size)))
