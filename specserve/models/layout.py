"""The layout of a pass: which positions its rows have, which slots they write, and which sequences attend together.

Plain arithmetic on arrays, the same for every model. Knows pages and rows; no attention, no cache policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.models.shape_buckets import recurring

Ints = NDArray[np.int64]

DIRECT = 4096  # up to so many multiplications torch's own loops take a bf16 product over from oneDNN, and sum in another order
FEW_QUERIES = 32  # up to here sequences are batched together; longer runs (prompts) attend one sequence at a time
COARSE = 4  # up to so many rows short runs in mixed company keep a number of their own
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
    seen: Ints | None = (
        None  # [seqs] nothing is written: all rows of a sequence see so many keys, those of a source
    )

    @property
    def lengths(self) -> Ints:
        """How far the rows of each sequence see."""
        return self.starts + self.counts if self.seen is None else self.seen

    def sights(self, positions: Ints) -> Ints:  # both [passes, seqs, queries]
        """The last key that rows at these positions see: their own, or the last of the source."""
        return (
            positions if self.seen is None else np.zeros_like(positions) + (self.seen[:, None] - 1)
        )


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of a group, as they were and as attention wants them."""

    table: Ints  # [seqs, pages]
    device_table: Tensor  # the same, for kernels that read pages where they lie
    gather: Tensor  # [seqs * kv_heads * context] into a pool seen as [slots * kv_heads, dim]
    slots: Tensor  # [seqs, context] of every position
    keys: Tensor  # [context] 0, 1, ...


@dataclass(frozen=True, slots=True)
class Sight:
    """Which keys the queries of one pass, or of several in a row, may see. Made for all of them when the first layer asks."""

    positions: Tensor  # [passes, seqs, queries]
    keys: Tensor  # [context]
    known: dict[int | None, tuple[Tensor, ...]] = field(
        default_factory=dict
    )  # by window; layers share them

    def biases(
        self, window: int | None
    ) -> tuple[Tensor, ...]:  # of each pass [seqs, 1, queries, 1, context]
        """To be added to scores: 0 for a key in sight, -inf for one that is not."""
        if window not in self.known:
            positions = self.positions[:, :, None, :, None, None]
            hidden = self.keys > positions
            if window is not None:
                hidden |= self.keys <= positions - window
            self.known[window] = (
                torch.zeros(hidden.shape, device=hidden.device)
                .masked_fill_(hidden, float("-inf"))
                .unbind(0)
            )
        return self.known[window]


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that attend in one batched product: each has `queries` rows and `context` keys, padded at the end."""

    rows: (
        Tensor | None
    )  # [seqs * queries] the pass's row at each place, padding repeats a row; None: all rows in order
    valid: Tensor | None  # [n] the places that are no padding; None: all
    positions: Tensor  # [seqs, queries] the last key that each row sees
    pages: Pages
    seqs: int
    queries: int
    context: int  # a multiple of the block
    block: int
    rounded: bool  # padded up to a shape that recurs
    sight: Sight
    turn: int = 0  # which of the sight's passes this is
    distances: Tensor | None = (
        None  # [seqs, kv_heads, queries, 1, context] what relative positions add to scores, in place of the sight's
    )

    def bias(
        self, window: int | None
    ) -> Tensor:  # [seqs, kv_heads or 1, queries, 1, context] -inf where a key is out of sight, mostly 0 elsewhere
        return self.sight.biases(window)[self.turn] if self.distances is None else self.distances


@dataclass(frozen=True, slots=True)
class Layout:
    positions: Tensor  # [rows]
    slots: Tensor  # [rows]
    groups: tuple[Group, ...]
    cross: tuple[
        Group, ...
    ] = ()  # the same rows before the sources of their sequences, in an encoder-decoder


class Planner:
    """Lays passes out. Remembers the pages of the last one: those of a decoding batch seldom change from pass to pass."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._last: tuple[Pages, ...] = ()

    def lay_out(self, writes: Writes) -> Layout:
        return self.unroll(writes, 1)[0]

    def unroll(self, writes: Writes, passes: int) -> list[Layout]:
        """`passes` passes in a row that write as many tokens of each sequence. `writes` is the last; all reach and gather as far as that one."""
        recurs = self._recurs(int(writes.counts[0]))
        if len(writes.counts) == 1 and writes.seen is None and recurs:
            layouts = self._alone(writes, passes)
        else:
            kinds = _kinds(writes) if writes.context is None else None
            even = (
                recurs
                and (writes.counts == writes.counts[0]).all()
                and (kinds is None or (kinds == kinds[0]).all())
            )
            layouts = self._even(writes, passes) if even else self._uneven(writes, kinds, passes)
        self._last = tuple(group.pages for group in layouts[0].groups)
        return layouts

    def _alone(self, writes: Writes, passes: int) -> list[Layout]:
        """One sequence: its positions are a stretch of all there are, and its slots a stretch of its own."""
        queries = int(writes.counts[0])
        rows = passes * queries
        stop = int(writes.starts[0]) + queries
        first = stop - rows
        pages, context = self._pages(0, writes, stop)
        positions = pages.keys.narrow(0, first, rows).view(passes, queries)
        slots = pages.slots.narrow(1, first, rows).view(passes, queries)
        groups = self._groups(positions.unsqueeze(1), pages, context, writes)
        return [
            Layout(*of_pass)
            for of_pass in zip(positions.unbind(0), slots.unbind(0), zip(groups), strict=True)
        ]

    def _even(self, writes: Writes, passes: int) -> list[Layout]:
        """All sequences write as many tokens and attend together: a decoding round."""
        queries = int(writes.counts[0])
        back = np.arange((1 - passes) * queries, queries).reshape(
            passes, 1, queries
        )  # from the last pass
        positions = writes.starts[:, None] + back  # [passes, seqs, queries]
        slots = self._slots(writes.table, np.arange(len(writes.starts))[:, None], positions)
        own = self._tensor(positions)
        seen = own if writes.seen is None else self._tensor(writes.sights(positions))
        groups = self._groups(seen, *self._pages(0, writes, int(writes.lengths.max())), writes)
        return [
            Layout(*of_pass)
            for of_pass in zip(
                own.flatten(1).unbind(0),
                self._tensor(slots).flatten(1).unbind(0),
                zip(groups),
                strict=True,
            )
        ]

    def _uneven(self, writes: Writes, kinds: Ints | None, passes: int) -> list[Layout]:
        counts = writes.counts
        owner = np.repeat(np.arange(len(counts)), counts)  # [rows]
        firsts = np.cumsum(counts) - counts
        back = np.arange(1 - passes, 1)[:, None] * counts  # [passes, seqs] from the last pass
        positions = (
            np.arange(len(owner)) + (writes.starts - firsts + back)[:, owner]
        )  # [passes, rows]
        slots = self._slots(writes.table, owner, positions)
        companies = (
            [np.arange(len(counts))]
            if kinds is None
            else [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
        )
        groups = []
        for index, company in enumerate(companies):
            seqs, queries = self._padded(len(company), int(counts[company].max()))
            members = np.concatenate([company, np.repeat(company[-1:], seqs - len(company))])
            columns = np.arange(queries)
            own = counts[members, None]
            places = (
                np.minimum(columns, own - 1) + firsts[members, None]
            )  # [seqs, queries], padding repeats the last
            inside = columns < own
            inside[len(company) :] = False
            seen = None if writes.seen is None else writes.seen[members]
            part = Writes(
                writes.starts[members], counts[members], writes.table[members], writes.context, seen
            )
            valid = None if inside.all() else self._tensor(np.flatnonzero(inside))
            at = self._tensor(part.sights(positions[:, places]))
            pages, context = self._pages(index, part, int(part.lengths.max()))
            groups.append(
                self._groups(
                    at, pages, context, part, rows=self._tensor(places.reshape(-1)), valid=valid
                )
            )
        of_passes = zip(
            self._tensor(positions).unbind(0),
            self._tensor(slots).unbind(0),
            zip(*groups, strict=True),
            strict=True,
        )
        return [Layout(*of_pass) for of_pass in of_passes]

    def _recurs(self, queries: int) -> bool:
        """Whether runs of so many rows are of a shape that comes again: the short ones of decoding, and some of the long ones."""
        return queries <= FEW_QUERIES or self._padded(1, queries) == (1, queries)

    def _padded(self, seqs: int, queries: int) -> tuple[int, int]:
        """To what a mixed company grows. Short runs are mixed in every way there is and share few lengths; a sequence more has its keys gathered."""
        if self.geometry.device.type != "cpu":
            return seqs, queries
        return recurring(seqs), recurring(
            queries, exact=COARSE
        ) if queries <= FEW_QUERIES else recurring(queries)

    def _slots(self, table: Ints, owner: Ints, positions: Ints) -> Ints:
        """Where positions of these rows of the table live; the arguments broadcast."""
        pages, offsets = np.divmod(positions, self.geometry.page_size)
        return table[owner, pages] * self.geometry.page_size + offsets

    def _groups(
        self,
        positions: Tensor,
        pages: Pages,
        context: int,
        writes: Writes,
        *,
        rows: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> list[Group]:
        """One for each pass; positions [passes, seqs, queries]."""
        _, seqs, queries = positions.shape
        block, rounded, sight = (
            self.geometry.block,
            writes.context is not None,
            Sight(positions, pages.keys),
        )
        return [
            Group(rows, valid, own, pages, seqs, queries, context, block, rounded, sight, turn)
            for turn, own in enumerate(positions.unbind(0))
        ]

    def _pages(self, index: int, writes: Writes, length: int) -> tuple[Pages, int]:
        """Of a group, and how far it attends. What the table says past the longest sequence's `length` is seen by nobody, and may be outdated."""
        size = self.geometry.page_size
        context = writes.context or self.geometry.context(length)
        table, used = writes.table[:, : -(-context // size)], -(-length // size)
        last = self._last[index] if index < len(self._last) else None
        if (
            last is not None
            and last.slots.shape == (len(table), context)
            and last.table[:, :used].tobytes() == table[:, :used].tobytes()
        ):
            return last, context
        return self._new_pages(table, context), context

    def _new_pages(self, table: Ints, context: int) -> Pages:
        size, kv_heads = self.geometry.page_size, self.geometry.kv_heads
        slots = (table[:, :, None] * size + np.arange(size)).reshape(len(table), -1)[
            :, :context
        ]  # [seqs, context]
        gather = (
            slots[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]
        )  # [seqs, kv_heads, context]
        return Pages(
            table,
            self._tensor(np.ascontiguousarray(table)),
            self._tensor(gather.reshape(-1)),
            self._tensor(slots),
            self._tensor(np.arange(context)),
        )

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
    size = np.maximum(np.ceil(np.log2(np.maximum(writes.lengths, 1))), SMALL_CONTEXT).astype(
        np.int64
    )
    return np.where(writes.counts <= FEW_QUERIES, size, -1 - np.arange(len(size)))
