"""One pass of a model over its cache: truncate, write, forward, logits of the asked positions. Target and draft run the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.models.cache import PagedCache
from specserve.models.layout import Geometry, Planner, Writes, key_block
from specserve.models.network import Network
from specserve.types import Step


class Runner:
    """Owns a network and its cache. A step is idempotent: what lies past its start is dropped before anything is written."""

    def __init__(
        self, network: Network, cache: PagedCache, *, device: torch.device, round_up: Callable[[Writes, Geometry], Writes | None] | None = None
    ) -> None:
        self.network, self.cache, self.device, self.round_up = network, cache, device, round_up
        block = key_block(cache.kv_heads * min(cache.keys[0].shape[2], cache.values[0].shape[2]))
        self.planner = Planner(Geometry(cache.page_size, cache.kv_heads, block, device))

    @torch.inference_mode()
    def run(self, steps: Sequence[Step], wanted: Sequence[int]) -> Tensor:
        """Logits [sum(wanted), vocab] of the last `wanted[i]` positions of each step. Raises OutOfPages."""
        for step in steps:  # all of them first: what one drops may be the room that another needs
            self.cache.truncate(step.seq_id, step.start)
        steps = [self._write(step, keep) for step, keep in zip(steps, wanted, strict=True)]
        counts = np.fromiter((len(step.tokens) for step in steps), np.int64, len(steps))
        starts = np.fromiter((step.start for step in steps), np.int64, len(steps))
        ids = np.fromiter(chain.from_iterable(step.tokens for step in steps), np.int64, int(counts.sum()))
        rows = _last(counts, np.asarray(wanted))
        return self._forward(ids, self._writes(steps, starts, counts), rows)[: len(rows)]

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self.cache.release(seq_id)

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

    def _writes(self, steps: Sequence[Step], starts: NDArray[np.int64], counts: NDArray[np.int64]) -> Writes:
        pages = self.planner.geometry.num_pages(int((starts + counts).max()))
        return Writes(starts, counts, self.cache.table([step.seq_id for step in steps], pages))

    def _forward(self, ids: NDArray[np.int64], writes: Writes, rows: NDArray[np.int64]) -> Tensor:
        rounded = self.round_up(writes, self.planner.geometry) if self.round_up is not None else None
        if rounded is None:
            return self._logits(ids, writes, rows if len(rows) else np.zeros(1, np.int64))
        last = ids[len(ids) - int(writes.counts[-1]) :]
        ids = np.concatenate([ids, np.tile(last, len(rounded.counts) - len(writes.counts))])
        return self._logits(ids, rounded, np.arange(len(ids))).index_select(0, self._tensor(rows))

    def _logits(self, ids: NDArray[np.int64], writes: Writes, rows: NDArray[np.int64]) -> Tensor:
        return self.network.logits(self._tensor(ids), self.planner.lay_out(writes), self._tensor(rows))

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _last(counts: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Row numbers of the last `wanted[i]` rows of each run of `counts[i]` rows."""
    offsets = np.arange(int(wanted.sum())) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    return offsets + np.repeat(np.cumsum(counts) - wanted, wanted)
