"""Run passes of a model over its KV cache: truncate, write, forward, logits of some positions.

Prefill, verification and drafting are all steps of such a pass; target and draft run the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.models.adapters import Adapters, adapters_of
from specserve.models.cache import Fork, PagedCache
from specserve.models.layout import Geometry, Ints, Layout, Writes
from specserve.models.network import Network
from specserve.models.planner import Planner, key_block_size
from specserve.models.shard import GatheredHead
from specserve.transfers import to_device
from specserve.types import Step

MAX_READ_ROWS = 256
"""Rows of logits that a reader is given at once: memory for that many times the vocabulary."""


@dataclass(frozen=True, slots=True)
class LogitsReader:
    """A reader of the logits of the first rows of each step, which are never all in memory.

    `read` is called with one slice after the other, in the order of the rows.
    """

    num_rows: Sequence[int]  # of each step; 0 for one that is not read
    read: Callable[[Tensor], None]


class Runner:
    """A network and its KV cache.

    A step is idempotent: the cache is rolled back to the step's start before anything is written.
    """

    def __init__(
        self,
        network: Network,
        cache: PagedCache,
        *,
        device: torch.device,
        pad_to_bucket: Callable[[Writes, Geometry], Writes | None] | None = None,
        adapters: Adapters | None = None,
        sharded_head: GatheredHead | None = None,
    ) -> None:
        self.network, self.cache, self.device = network, cache, device
        self.pad_to_bucket, self.adapters = pad_to_bucket, adapters
        self.sharded_head = sharded_head
        # Mask of the ids that a drafter can draw; None: all.
        self.drawable: NDArray[np.bool_] | None = None
        # Called with the steps of each `run` as they are computed, between room and pass.
        self.on_written: Callable[[Sequence[Step]], None] | None = None
        width = cache.kv_heads * min(cache.keys[0].shape[2], cache.values[0].shape[2])
        self.planner = Planner(
            Geometry(
                cache.page_size, cache.kv_heads, key_block_size(width), device, network.run_rows
            )
        )

    def positions(self, step: Step) -> range:
        """Return the positions of the cache that a step writes."""
        return range(step.start, step.stop)

    @torch.inference_mode()
    def run(
        self,
        steps: Sequence[Step],
        num_logits: Sequence[int],
        reader: LogitsReader | None = None,
    ) -> Tensor:
        """Return the logits [sum(num_logits), vocab] of the last positions of each step.

        Step i has `num_logits[i]` of them; one with 0 is prefill whose logits nothing needs. The
        reader is given the logits of first positions besides; a step with such ones is computed
        whole. Raises OutOfPages.
        """
        num_read = [0] * len(steps) if reader is None else reader.num_rows
        steps = self.write(steps, num_logits, num_read)
        if self.on_written is not None:
            self.on_written(steps)
        seq_ids = [step.seq_id for step in steps]
        counts = [len(step.tokens) for step in steps]
        ids = np.fromiter(chain.from_iterable(step.tokens for step in steps), np.int64, sum(counts))
        starts = np.array([step.start for step in steps])
        writes = Writes(
            starts, np.array(counts), self.block_table(seq_ids, max(step.stop for step in steps))
        )
        if reader is None and counts == list(num_logits):
            with adapters_of(steps, self.adapters):
                return self._forward(ids, seq_ids, writes, None)
        rows = _last_rows(writes.counts, np.array(num_logits))
        kept = rows if len(rows) else np.zeros(1, np.int64)
        with adapters_of(steps, self.adapters):
            logits = (
                self._forward(ids, seq_ids, writes, kept)
                if reader is None
                else self._forward_in_parts(ids, seq_ids, writes, kept, reader)
            )
        # Prompts are committed as soon as they are computed: the next pass may attach their pages,
        # even if the sequence itself has ended.
        for step, keep in zip(steps, num_logits, strict=True):
            if len(step.tokens) - keep >= self.cache.page_size:
                self.cache.commit(step.seq_id, step.stop - max(keep, 1) + 1)
        return logits[: len(rows)]

    def write(
        self, steps: Sequence[Step], num_logits: Sequence[int], num_read: Sequence[int]
    ) -> list[Step]:
        """Reserve room for steps and write their tokens; return the parts left to compute.

        What the prefix cache has of a step is attached, unless its first positions are read. Raises
        OutOfPages.
        """
        # All steps are truncated first: what one drops may be the room that another needs.
        for step in steps:
            self.cache.truncate(step.seq_id, step.start)
        return [
            self._write_step(step, keep, may_attach=not read)
            for step, keep, read in zip(steps, num_logits, num_read, strict=True)
        ]

    def decode_passes(self, seq_ids: Sequence[int], counts: Sequence[int]) -> DecodePasses:
        """Prepare passes that each write one more token of these sequences.

        Sequence i takes part in `counts[i]` passes; the counts do not increase. Raises OutOfPages.
        """
        return DecodePasses(self, seq_ids, counts)

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self.cache.release(seq_id)

    def fork_many(self, forks: Sequence[Fork]) -> None:
        """Fork all sequences or none. Raises OutOfPages; nothing has changed then."""
        self.cache.fork_many(forks)

    def promote_branch(self, seq_id: int, branch_id: int) -> None:
        """Replace `seq_id` with `branch_id`."""
        self.cache.promote_branch(seq_id, branch_id)

    def lay_out(self, seq_ids: Sequence[int], writes: Writes, passes: int = 1) -> list[Layout]:
        """Return layouts of consecutive passes over these sequences; `writes` is the last."""
        return self.planner.lay_out_passes(writes, passes)

    def block_table(self, seq_ids: Sequence[int], length: int) -> Ints:  # [seqs, pages]
        """Return the block table of these sequences, wide enough for `length` in whole blocks."""
        return self.cache.block_table(seq_ids, self.planner.geometry.num_pages(length))

    def padded(self, writes: Writes) -> Writes | None:
        """Return the pass padded to a bucketed shape; None if it runs in its own shape."""
        return (
            None
            if self.pad_to_bucket is None
            else self.pad_to_bucket(writes, self.planner.geometry)
        )

    def _write_step(self, step: Step, keep: int, *, may_attach: bool = True) -> Step:
        """Reserve room for a step and attach what the prefix cache has of it, if it may.

        Returns the part that is left to compute, which includes the last `keep` positions.
        """
        cache = self.cache
        if step.start == 0:
            cache.begin(step.seq_id, step.cache_salt)
        is_long = len(step.tokens) - keep >= cache.page_size
        if may_attach and is_long:
            prompt = step.tokens[: len(step.tokens) - max(keep, 1) + 1]
            found = cache.attach_prefix(step.seq_id, prompt)
            if found:
                step = Step(
                    step.seq_id, step.start + found, step.tokens[found:], adapter=step.adapter
                )
        cache.reserve(step.seq_id, step.stop)
        cache.append(step.seq_id, step.tokens)
        return step

    def _forward(
        self, ids: Ints, seq_ids: Sequence[int], writes: Writes, rows: Ints | None
    ) -> Tensor:
        """Return the logits of these rows of the pass; None: of all rows."""
        padded = self.padded(writes)
        if padded is None:
            row_ids = None if rows is None else self._tensor(rows)
            return self.network.logits(self._tensor(ids), self.lay_out(seq_ids, writes)[0], row_ids)
        num_rows = len(ids)
        last = ids[num_rows - int(writes.counts[-1]) :]
        ids = np.concatenate([ids, np.tile(last, len(padded.counts) - len(writes.counts))])
        logits = self.network.logits(self._tensor(ids), self.planner.lay_out(padded), None)
        return logits[:num_rows] if rows is None else logits.index_select(0, self._tensor(rows))

    def _forward_in_parts(
        self, ids: Ints, seq_ids: Sequence[int], writes: Writes, rows: Ints, reader: LogitsReader
    ) -> Tensor:
        """Give the reader its rows of the pass in slices, and return the logits of these rows."""
        read = _first_rows(writes.counts, np.array(reader.num_rows))
        slices = [read[i : i + MAX_READ_ROWS] for i in range(0, len(read), MAX_READ_ROWS)]
        parts = [self._tensor(part) for part in (*slices, rows)]
        layout = self.lay_out(seq_ids, writes)[0]
        logits = self.network.logits_in_parts(self._tensor(ids), layout, parts)
        for _ in slices:
            reader.read(next(logits))
        return next(logits)

    def _tensor(self, array: Ints) -> Tensor:
        return to_device(array, self.device)


class DecodePasses:
    """Passes of one token a sequence, laid out before they run.

    Each is thus little more than its forward pass. The pages are reserved at once. The caller
    appends the tokens to the cache once it knows how many there are.
    """

    def __init__(self, runner: Runner, seq_ids: Sequence[int], counts: Sequence[int]) -> None:
        cache = runner.cache
        self._runner, self._seq_ids, self._counts = runner, seq_ids, counts
        starts = [cache.length(seq_id) for seq_id in seq_ids]
        stops = [start + count for start, count in zip(starts, counts, strict=True)]
        for seq_id, stop in zip(seq_ids, stops, strict=True):
            cache.reserve(seq_id, stop)
        self._starts = np.array(starts)
        self._block_table = runner.block_table(seq_ids, max(stops))
        self._done = self._rows = self._padding = 0
        self._layouts: Iterator[Layout] = iter(())

    def logits(self, ids: Tensor) -> Tensor:  # [rows] -> [rows, vocab]
        """Run the next pass, over the first sequences: as many as there are ids.

        The others have dropped out for good.
        """
        rows = len(ids)
        if rows != self._rows:
            self._rows = rows
            self._lay_out(min(self._counts[:rows]) - self._done)
        self._done += 1
        if self._padding:
            ids = torch.cat([ids, ids[-1:].expand(self._padding)])
        logits = self._runner.network.logits(ids, next(self._layouts), None)
        return logits[:rows] if self._padding else logits

    def _lay_out(self, passes: int) -> None:
        """Lay out the passes until another sequence has taken part in all of its own."""
        rows = self._rows
        last = Writes(
            self._starts[:rows] + self._done + passes - 1,
            np.ones(rows, np.int64),
            self._block_table[:rows],
        )
        padded = self._runner.padded(last) or last
        self._padding = len(padded.counts) - rows
        self._layouts = iter(self._runner.lay_out(self._seq_ids[:rows], padded, passes))


def _first_rows(counts: Ints, num_rows: Ints) -> Ints:
    """Return row numbers of the first `num_rows[i]` rows of each run of `counts[i]` rows."""
    # Rows of the runs before that are not wanted.
    skipped = np.cumsum(counts - num_rows) - (counts - num_rows)
    rows: Ints = np.arange(int(num_rows.sum())) + np.repeat(skipped, num_rows)
    return rows


def _last_rows(counts: Ints, num_logits: Ints) -> Ints:
    """Return row numbers of the last `num_logits[i]` rows of each run of `counts[i]` rows."""
    firsts = np.cumsum(num_logits) - num_logits
    offsets = np.arange(int(num_logits.sum())) - np.repeat(firsts, num_logits)
    return offsets + np.repeat(np.cumsum(counts) - num_logits, num_logits)
