"""The hidden states that an EAGLE-3 head reads, beside its KV cache.

Each slot of the cache holds the state after its position: the target's, once it is there, and
until then the head's own. Branches and truncated sequences thus have their states with their pages.
One number more in each slot says whose the state is. Knows no network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.models.cache import PagedCache
from specserve.models.hidden_taps import HiddenRows
from specserve.models.layout import Layout
from specserve.types import Step

UNKNOWN = math.nan
"""Value of a state that is not there."""
OWN, TARGETS = 0.0, 1.0
"""The number stored after a state: of the head's own, and of the target's."""


class ArrivedStates:
    """The target's states that have arrived, and may still be read."""

    def __init__(self, project: Callable[[Tensor], Tensor]) -> None:
        """Create an empty store; `project` makes of the target's states what is kept of them."""
        self._project = project
        self._parts: dict[int, list[HiddenRows]] = {}  # of each sequence, by position

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._parts

    def parts(self, seq_id: int) -> Sequence[HiddenRows]:
        return self._parts.get(seq_id, ())

    def receive(self, hidden: Sequence[HiddenRows]) -> None:
        """Keep new states of the target, projected.

        They replace the states of the same and of later positions of their sequences.
        """
        if not hidden:
            return
        projected = self._project(torch.cat([each.rows for each in hidden]))
        parts = torch.split(projected, [len(each.rows) for each in hidden])
        for each, rows in zip(hidden, parts, strict=True):
            known = self._parts.setdefault(each.seq_id, [])
            # Where nothing is drafted, there is one of each round: only the last ones are read.
            while known and known[-1].stop > each.start:
                part = known.pop().between(0, each.start)
                if len(part.rows):
                    known.append(part)
            known.append(HiddenRows(each.seq_id, each.start, rows))

    def read(self, seq_id: int, first: int, last: int) -> list[HiddenRows]:
        """Return the states after these positions that have arrived, and drop those before."""
        parts = [part.between(first) for part in self.parts(seq_id)]
        if seq_id in self._parts:
            self._parts[seq_id] = [part for part in parts if len(part.rows)]
        return [part for one in parts if len((part := one.between(first, last)).rows)]

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._parts.pop(seq_id, None)


class TargetStates:
    """The target's states that have arrived and are not in the cache yet.

    States of positions that a prefix cache of the target has attached never arrive. Rows that
    follow such a position are computed and not attended to.
    """

    def __init__(self, cache: PagedCache, project: Callable[[Tensor], Tensor]) -> None:
        self._cache, self.project = cache, project
        self.arrived = ArrivedStates(lambda taps: F.pad(project(taps), (0, 1), value=TARGETS))
        # Own states that the next step of a sequence overwrites and reads.
        self._kept: dict[int, HiddenRows] = {}

    def release(self, seq_ids: Sequence[int]) -> None:
        self.arrived.release(seq_ids)
        for seq_id in seq_ids:
            self._kept.pop(seq_id, None)

    def keep_own(self, seq_id: int, start: int) -> None:
        """Keep the cached states from `start` on for a step that computes their rows again."""
        slots = self._cache.slots(seq_id, start, self._cache.length(seq_id))
        self._kept[seq_id] = HiddenRows(seq_id, start, self._cache.states.index_select(0, slots))

    @torch.inference_mode()
    def store(self, steps: Sequence[Step]) -> None:
        """Write the states that these steps' rows read into the cache, where there is room now.

        What a step has read is kept until a later step of the sequence begins after it, since the
        same step may come again.
        """
        slots, states = [], []
        for step in steps:
            first, last = max(step.start - 1, 0), step.stop - 1
            arrived = self.arrived.read(step.seq_id, first, last)
            if step.stop - 1 > step.start:  # the rows of this step read one another's states
                fresh = self._cache.slots(step.seq_id, step.start, last)
                slots.append(fresh)
                states.append(self._unknown(len(fresh)))
            kept = self._kept.pop(step.seq_id, None)
            if kept is not None and len((part := kept.between(step.start, last)).rows):
                slots.append(self._cache.slots(step.seq_id, part.start, part.stop))
                states.append(part.rows)
            for part in arrived:
                slots.append(self._cache.slots(step.seq_id, part.start, part.stop))
                states.append(part.rows)
        # In order: what is known replaces what is not.
        for where, rows in zip(slots, states, strict=True):
            self._cache.states.index_copy_(0, where, rows.to(self._cache.states.dtype))

    @torch.inference_mode()
    def fill(self, ranges: Sequence[tuple[int, range]], state: Tensor) -> None:
        """Write one state [hidden] after all of these positions of sequences.

        The pass that reads them replaces them.
        """
        slots = [
            self._cache.slots(seq_id, part.start, part.stop) for seq_id, part in ranges if part
        ]
        if slots:
            where, row = torch.cat(slots), F.pad(state, (0, 1), value=OWN)
            self._cache.states.index_copy_(0, where, row.expand(len(where), -1))

    def _unknown(self, num: int) -> Tensor:
        return self._cache.states.new_full((num, self._cache.states.shape[1]), UNKNOWN)


def previous_slots(layout: Layout, page_size: int) -> Tensor:  # [rows]
    """Return the slot of the position before each row, or the row's own at position 0."""
    if layout.runs is not None:  # on the host
        _, counts, _, owners = layout.runs.runs.numpy().T
        pages, offsets = np.divmod(np.maximum(layout.positions.numpy() - 1, 0), page_size)
        table = layout.runs.block_table.numpy()
        return torch.from_numpy(table[owners.repeat(counts), pages] * page_size + offsets)
    slots = torch.empty_like(layout.slots)
    for group in layout.groups:
        before = (group.last_keys - 1).clamp_min(0)  # [seqs, queries]
        found = group.pages.slots.gather(1, before).flatten()
        rows = group.rows
        if rows is None:
            return found
        if group.valid is not None:
            rows, found = rows.index_select(0, group.valid), found.index_select(0, group.valid)
        slots.index_copy_(0, rows, found)
    return slots
