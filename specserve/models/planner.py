"""Plan the layouts of passes: positions, slots, and which sequences attend together.

Plain arithmetic on arrays, the same for every model. Knows no attention and no cache policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specserve.models.layout import (
    AttentionGroup,
    AttentionMask,
    Geometry,
    GroupPages,
    Ints,
    Layout,
    Runs,
    Writes,
)
from specserve.models.shape_buckets import bucket_size
from specserve.transfers import to_device

MAX_DIRECT = 4096
"""Multiplications up to which torch's own loops compute a bf16 product, instead of oneDNN.

They sum in another order.
"""
MAX_BATCHED_QUERIES = 32
"""Queries up to which sequences attend in one batch; longer runs (prefill) attend one by one."""
MIXED_EXACT = 4
"""Query counts up to which short runs in a mixed group are not rounded up."""
SMALL_CONTEXT_LOG2 = 8
"""Contexts up to 2**8 keys are grouped together."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a pass, one sequence after the other."""

    firsts: Ints  # [seqs] the first row of each
    starts: Ints  # [passes, seqs] its position
    positions: Ints  # [passes, rows]
    slots: Ints  # [passes, rows]


class Planner:
    """Plans the layouts of passes.

    It keeps the pages of the last pass, because a decoding batch's pages seldom change between
    passes.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._last: tuple[GroupPages, ...] = ()

    def lay_out(self, writes: Writes) -> Layout:
        return self.lay_out_passes(writes, 1)[0]

    def lay_out_passes(self, writes: Writes, passes: int) -> list[Layout]:
        """Return the layouts of consecutive passes that write equally many tokens of a sequence.

        `writes` is that of the last pass; all passes gather as many keys as that one.
        """
        if self.geometry.run_rows is not None:
            return self._in_runs(writes, passes, self.geometry.run_rows)
        is_bucket = self._is_bucket(int(writes.counts[0]))
        if len(writes.counts) == 1 and writes.encoder_lengths is None and is_bucket:
            layouts = self._single_sequence(writes, passes)
        else:
            group_ids = _group_ids(writes) if writes.context is None else None
            uniform = (
                is_bucket
                and (writes.counts == writes.counts[0]).all()
                and (group_ids is None or (group_ids == group_ids[0]).all())
            )
            layouts = (
                self._uniform(writes, passes) if uniform else self._mixed(writes, group_ids, passes)
            )
        self._last = tuple(group.pages for group in layouts[0].groups)
        return layouts

    def _in_runs(self, writes: Writes, passes: int, run_rows: int) -> list[Layout]:
        """Lay out any sequences for attention that reads pages in place."""
        rows = self._rows(writes, passes)
        owner, first, counts = np.arange(len(writes.counts)), rows.firsts, writes.counts
        starts = rows.starts
        if counts.max() > run_rows:
            num_runs = -(-counts // run_rows)  # [seqs]
            owner = np.repeat(owner, num_runs)  # [runs]
            skipped = (np.arange(len(owner)) - (np.cumsum(num_runs) - num_runs)[owner]) * run_rows
            first, starts = first[owner] + skipped, starts[:, owner] + skipped
            counts = np.minimum(counts[owner] - skipped, run_rows)
        runs = np.empty((passes, len(owner), 4), np.int64)
        runs[:, :, 0], runs[:, :, 1], runs[:, :, 2], runs[:, :, 3] = first, counts, starts, owner
        block_table = torch.from_numpy(np.ascontiguousarray(writes.block_table))
        of_passes = zip(
            self._tensor(rows.positions).unbind(0),
            self._tensor(rows.slots).unbind(0),
            torch.from_numpy(runs).unbind(0),
            strict=True,
        )
        return [
            Layout(own, slots, (), runs=Runs(of_pass, block_table))
            for own, slots, of_pass in of_passes
        ]

    def _rows(self, writes: Writes, passes: int) -> Rows:
        """Return the rows of any sequences, in consecutive passes."""
        counts, owner = writes.counts, np.arange(len(writes.counts))
        starts = writes.starts + np.arange(1 - passes, 1)[:, None] * counts  # [passes, seqs]
        if counts.max() == 1:  # decoding
            return Rows(owner, starts, starts, self._slots(writes.block_table, owner, starts))
        owner, firsts = owner.repeat(counts), counts.cumsum() - counts  # [rows], [seqs]
        # [passes, rows], taken, not indexed, which would leave rows of a pass apart in memory
        positions = np.arange(len(owner)) + (starts - firsts).take(owner, axis=1)
        return Rows(firsts, starts, positions, self._slots(writes.block_table, owner, positions))

    def _single_sequence(self, writes: Writes, passes: int) -> list[Layout]:
        """Lay out one sequence, whose positions and slots are ranges of its group's."""
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

    def _uniform(self, writes: Writes, passes: int) -> list[Layout]:
        """Lay out sequences that write equally many tokens and attend together: decoding."""
        queries = int(writes.counts[0])
        # [passes, 1, queries] relative to the starts of the last pass
        offsets = np.arange((1 - passes) * queries, queries).reshape(passes, 1, queries)
        positions = writes.starts[:, None] + offsets  # [passes, seqs, queries]
        slots = self._slots(writes.block_table, np.arange(len(writes.starts))[:, None], positions)
        own = self._tensor(positions)
        last_keys = (
            own if writes.encoder_lengths is None else self._tensor(writes.last_keys(positions))
        )
        pages, context = self._pages(0, writes, int(writes.lengths.max()))
        groups = self._groups(last_keys, pages, context, writes)
        return [
            Layout(*of_pass)
            for of_pass in zip(
                own.flatten(1).unbind(0),
                self._tensor(slots).flatten(1).unbind(0),
                zip(groups),
                strict=True,
            )
        ]

    def _mixed(self, writes: Writes, group_ids: Ints | None, passes: int) -> list[Layout]:
        """Lay out any sequences, each group padded to its longest run of queries."""
        rows = self._rows(writes, passes)
        members_of_groups: list[Ints] = (
            [np.arange(len(writes.counts))]
            if group_ids is None
            else [np.flatnonzero(group_ids == group_id) for group_id in np.unique(group_ids)]
        )
        groups = [
            self._padded_group(index, group, writes, rows)
            for index, group in enumerate(members_of_groups)
        ]
        of_passes = zip(
            self._tensor(rows.positions).unbind(0),
            self._tensor(rows.slots).unbind(0),
            zip(*groups, strict=True),
            strict=True,
        )
        return [Layout(*of_pass) for of_pass in of_passes]

    def _padded_group(
        self, index: int, group: Ints, writes: Writes, all_rows: Rows
    ) -> list[AttentionGroup]:
        """Return a group of sequences in each pass, padded to a shape of few."""
        counts = writes.counts
        seqs, queries = self._bucket(len(group), int(counts[group].max()))
        members = np.concatenate([group, np.repeat(group[-1:], seqs - len(group))])
        columns = np.arange(queries)
        own = counts[members, None]
        rows = (
            np.minimum(columns, own - 1) + all_rows.firsts[members, None]
        )  # [seqs, queries], padding repeats the last
        inside = columns < own
        inside[len(group) :] = False
        encoder_lengths = (
            None if writes.encoder_lengths is None else writes.encoder_lengths[members]
        )
        part = Writes(
            writes.starts[members],
            counts[members],
            writes.block_table[members],
            writes.context,
            encoder_lengths,
        )
        valid = None if inside.all() else self._tensor(np.flatnonzero(inside))
        last_keys = self._tensor(part.last_keys(all_rows.positions[:, rows]))
        pages, context = self._pages(index, part, int(part.lengths.max()))
        rows_of_group = self._tensor(rows.reshape(-1))
        return self._groups(last_keys, pages, context, part, rows=rows_of_group, valid=valid)

    def _is_bucket(self, queries: int) -> bool:
        """Return whether runs of that many rows keep their shape: short ones and some long ones."""
        return queries <= MAX_BATCHED_QUERIES or self._bucket(1, queries) == (1, queries)

    def _bucket(self, seqs: int, queries: int) -> tuple[int, int]:
        """Return the padded (sequences, queries) of a mixed group on CPU.

        Query counts are rounded to few values because mixed short runs occur in every combination.
        A padding sequence costs a gather of its keys.
        """
        if self.geometry.device.type != "cpu":
            return seqs, queries
        return bucket_size(seqs), bucket_size(
            queries, exact=MIXED_EXACT
        ) if queries <= MAX_BATCHED_QUERIES else bucket_size(queries)

    def _slots(self, block_table: Ints, owner: Ints, positions: Ints) -> Ints:
        """Return the slots of positions in the rows `owner` of the block table; both broadcast."""
        pages, offsets = np.divmod(positions, self.geometry.page_size)
        return block_table[owner, pages] * self.geometry.page_size + offsets

    def _groups(
        self,
        last_keys: Tensor,  # [passes, seqs, queries]
        pages: GroupPages,
        context: int,
        writes: Writes,
        *,
        rows: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> list[AttentionGroup]:
        """Return one group for each pass."""
        _, seqs, queries = last_keys.shape
        block, is_bucketed, mask = (
            self.geometry.key_block,
            writes.context is not None,
            AttentionMask(last_keys, pages.keys),
        )
        return [
            AttentionGroup(
                rows, valid, own, pages, seqs, queries, context, block, is_bucketed, mask, index
            )
            for index, own in enumerate(last_keys.unbind(0))
        ]

    def _pages(self, index: int, writes: Writes, length: int) -> tuple[GroupPages, int]:
        """Return the pages of a group, reused from the last pass if possible, and its context.

        Entries of the block table past the longest sequence's `length` are seen by no query and
        may be outdated.
        """
        size = self.geometry.page_size
        context = writes.context or self.geometry.context(length)
        block_table, used = writes.block_table[:, : -(-context // size)], -(-length // size)
        last = self._last[index] if index < len(self._last) else None
        if (
            last is not None
            and last.slots.shape == (len(block_table), context)
            and last.block_table[:, :used].tobytes() == block_table[:, :used].tobytes()
        ):
            return last, context
        return self._new_pages(block_table, context), context

    def _new_pages(self, block_table: Ints, context: int) -> GroupPages:
        size, kv_heads = self.geometry.page_size, self.geometry.kv_heads
        slots = (block_table[:, :, None] * size + np.arange(size)).reshape(len(block_table), -1)[
            :, :context
        ]  # [seqs, context]
        gather = (
            slots[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]
        )  # [seqs, kv_heads, context]
        return GroupPages(
            block_table,
            self._tensor(np.ascontiguousarray(block_table)),
            self._tensor(gather.reshape(-1)),
            self._tensor(slots),
            self._tensor(np.arange(context)),
        )

    def _tensor(self, array: Ints) -> Tensor:
        return to_device(array, self.geometry.device)


def key_block_size(width: int) -> int:
    """Return how many keys one product sums over.

    It is always the same number for a model, and large enough that even one query's product is
    computed by oneDNN. `width` is that of all heads' keys or of all heads' values, whichever is
    narrower.
    """
    block = 256
    while block * width <= MAX_DIRECT:
        block *= 2
    return block


def _group_ids(writes: Writes) -> Ints:
    """Return for each sequence the id of the group it attends in.

    Short runs attend together if their contexts are within a factor of two, so that padding never
    doubles the work. Long runs attend alone.
    """
    size = np.maximum(np.ceil(np.log2(np.maximum(writes.lengths, 1))), SMALL_CONTEXT_LOG2).astype(
        np.int64
    )
    return np.where(writes.counts <= MAX_BATCHED_QUERIES, size, -1 - np.arange(len(size)))
