"""One pass of a model over its cache: truncate, write, forward, logits of the asked positions. Target and draft run the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from specserve.models.cache import Fork, PagedCache
from specserve.models.encoder_cache import Encoder, Sources
from specserve.models.layout import Geometry, Ints, Layout, Planner, Writes, key_block
from specserve.models.network import Network
from specserve.types import Step


class Runner:
    """Owns a network and its cache. A step is idempotent: what lies past its start is dropped before anything is written."""

    def __init__(
        self,
        network: Network,
        cache: PagedCache,
        *,
        device: torch.device,
        round_up: Callable[[Writes, Geometry], Writes | None] | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self.network, self.cache, self.device, self.round_up = network, cache, device, round_up
        block = key_block(cache.kv_heads * min(cache.keys[0].shape[2], cache.values[0].shape[2]))
        self.planner = Planner(Geometry(cache.page_size, cache.kv_heads, block, device))
        self.sources = None if encoder is None else Sources(encoder, cache, self.planner.geometry)

    @torch.inference_mode()
    def run(self, steps: Sequence[Step], wanted: Sequence[int]) -> Tensor:
        """Logits [sum(wanted), vocab] of the last `wanted[i]` positions of each step. Raises OutOfPages."""
        for step in steps:  # all of them first: what one drops may be the room that another needs
            self.cache.truncate(step.seq_id, step.start)
        steps = [self._write(step, keep) for step, keep in zip(steps, wanted, strict=True)]
        if self.sources is not None:
            self.sources.read(steps)
        seq_ids = [step.seq_id for step in steps]
        counts = [len(step.tokens) for step in steps]
        ids = np.fromiter(chain.from_iterable(step.tokens for step in steps), np.int64, sum(counts))
        starts = np.array([step.start for step in steps])
        writes = Writes(
            starts, np.array(counts), self.table(seq_ids, max(step.stop for step in steps))
        )
        if counts == list(wanted):
            return self._forward(ids, seq_ids, writes, None)
        rows = _last(writes.counts, np.array(wanted))
        return self._forward(ids, seq_ids, writes, rows if len(rows) else np.zeros(1, np.int64))[
            : len(rows)
        ]

    def unroll(self, seq_ids: Sequence[int], counts: Sequence[int]) -> Unrolled:
        """Passes that will each write one more token of the sequences that go on; `counts`, falling, says how many each may. Raises OutOfPages."""
        return Unrolled(self, seq_ids, counts)

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self.cache.release(seq_id)
            if self.sources is not None:
                self.sources.release(seq_id)

    def fork_many(self, forks: Sequence[Fork]) -> None:
        """Raises OutOfPages; nothing was forked then."""
        self.cache.fork_many(forks)
        if self.sources is not None:
            for fork in forks:
                self.sources.fork(fork.seq_id, fork.as_id)

    def become(self, seq_id: int, other_id: int) -> None:
        """`other_id` takes the place of `seq_id`."""
        self.cache.become(seq_id, other_id)
        if self.sources is not None:
            self.sources.become(seq_id, other_id)

    def lay_out(self, seq_ids: Sequence[int], writes: Writes, passes: int = 1) -> list[Layout]:
        """Passes in a row over these sequences; `writes` is the last."""
        layouts = self.planner.unroll(writes, passes)
        if self.sources is None:
            return layouts
        cross = self.sources.groups(seq_ids, writes.counts)
        return [replace(layout, cross=cross) for layout in layouts]

    def table(self, seq_ids: Sequence[int], length: int) -> Ints:  # [seqs, pages]
        """The pages of these sequences, wide enough for a context of `length` in whole blocks."""
        return self.cache.table(seq_ids, self.planner.geometry.num_pages(length))

    def rounded(self, writes: Writes) -> Writes | None:
        return None if self.round_up is None else self.round_up(writes, self.planner.geometry)

    def _write(self, step: Step, keep: int) -> Step:
        """Make room for a step and take what the prefix cache has of it; the step that is left to compute."""
        cache = self.cache
        if step.start % cache.page_size == 0 and len(step.tokens) - keep >= cache.page_size:
            found = cache.match(step.seq_id, step.tokens[: len(step.tokens) - max(keep, 1) + 1])
            if found:
                step = Step(step.seq_id, step.start + found, step.tokens[found:])
        cache.reserve(step.seq_id, step.stop)
        cache.append(step.seq_id, step.tokens)
        return step

    def _forward(
        self, ids: Ints, seq_ids: Sequence[int], writes: Writes, rows: Ints | None
    ) -> Tensor:
        """Logits of these rows of the pass; None: of all."""
        rounded = self.rounded(writes)
        if rounded is None:
            wanted = None if rows is None else self._tensor(rows)
            return self.network.logits(self._tensor(ids), self.lay_out(seq_ids, writes)[0], wanted)
        num_rows = len(ids)
        last = ids[num_rows - int(writes.counts[-1]) :]
        ids = np.concatenate([ids, np.tile(last, len(rounded.counts) - len(writes.counts))])
        logits = self.network.logits(self._tensor(ids), self.planner.lay_out(rounded), None)
        return logits[:num_rows] if rows is None else logits.index_select(0, self._tensor(rows))

    def _tensor(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self.device)


class Unrolled:
    """Passes of one token a sequence, laid out before they run, so that a pass is little more than its forward pass.

    The room is reserved at once. The cache is told of the tokens by `append` once it is known how many there are.
    """

    def __init__(self, runner: Runner, seq_ids: Sequence[int], counts: Sequence[int]) -> None:
        cache = runner.cache
        self._runner, self._seq_ids, self._counts = runner, seq_ids, counts
        starts = [cache.length(seq_id) for seq_id in seq_ids]
        stops = [start + count for start, count in zip(starts, counts, strict=True)]
        for seq_id, stop in zip(seq_ids, stops, strict=True):
            cache.reserve(seq_id, stop)
        self._starts, self._table = np.array(starts), runner.table(seq_ids, max(stops))
        self._done = self._rows = self._padding = 0
        self._layouts: Iterator[Layout] = iter(())

    def logits(self, ids: Tensor) -> Tensor:  # [rows] -> [rows, vocab]
        """Of the first sequences, as many as there are ids; the others have dropped out for good."""
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
        """The next passes, until one more sequence has had all of its own."""
        rows = self._rows
        last = Writes(
            self._starts[:rows] + self._done + passes - 1,
            np.ones(rows, np.int64),
            self._table[:rows],
        )
        rounded = self._runner.rounded(last) or last
        self._padding = len(rounded.counts) - rows
        self._layouts = iter(self._runner.lay_out(self._seq_ids[:rows], rounded, passes))


def _last(counts: Ints, wanted: Ints) -> Ints:
    """Row numbers of the last `wanted[i]` rows of each run of `counts[i]` rows."""
    offsets = np.arange(int(wanted.sum())) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    return offsets + np.repeat(np.cumsum(counts) - wanted, wanted)
