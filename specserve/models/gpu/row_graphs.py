"""Captured CUDA graphs for attention that reads pages in place: a fixed list, made at the start.

A graph is for a number of rows, whosever they are and however long their contexts: uneven drafts,
decoding and ends of prompts share it. What it does not compute is planned outside of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specserve.errors import first_line
from specserve.models.cache import PagedCache
from specserve.models.gpu.graph_capture import CapturedPass, GraphCapture
from specserve.models.layout import Layout, Runs, RunsSize
from specserve.models.network import CapturableNetwork, ShareableNetwork
from specserve.models.shard import Shard

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 24, *range(32, 129, 16))
"""Numbers of rows that passes are padded to.

In longer passes products take the time, and the host is ahead of the card without graphs: by the
roofline, 256 rows in the place of 225 cost a 70B model on four cards 8% of a pass.
"""
MAX_LISTED_PAGES = 2**22
"""Pages of all sequences of a pass, shared ones counted each time: 16 MiB on the card."""


class GraphAttention(Protocol):
    """Attention whose passes can be captured."""

    def make_room(self, *, seqs: int, pages: int, device: torch.device) -> None: ...

    def plan_graph(self, runs: Runs) -> None:
        """Plan the next replay of the graph of this size."""
        ...


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """The memory from which all graphs read their rows."""

    ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows]

    @classmethod
    def with_room(cls, rows: int, device: torch.device) -> GraphInputs:
        return cls(*(torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)))

    def layout(self, runs: Runs) -> Layout:
        assert runs.size is not None
        rows = runs.size.rows
        return Layout(self.positions[:rows], self.slots[:rows], (), runs=runs)


class RowGraphs:
    """A network that replays the graph of the next larger size, and runs passes that have none.

    Where one graph cannot be captured there are none at all.
    """

    def __init__(
        self,
        network: CapturableNetwork,
        attention: GraphAttention,
        cache: PagedCache,
        *,
        device: torch.device,
        max_context: int,
        shard: Shard | None = None,
    ) -> None:
        self.network, self.run_rows, self._attention = network, network.run_rows, attention
        self._cache, self._device, self._shard = cache, device, shard
        self._max_context = max_context
        self._inputs = GraphInputs.with_room(ROWS[-1], device)
        self._max_pages = min(MAX_LISTED_PAGES, ROWS[-1] * -(-max_context // cache.page_size))
        self.captured: dict[RunsSize, CapturedPass] = {}
        attention.make_room(seqs=ROWS[-1], pages=self._max_pages, device=device)
        self._capture_all()

    def logits(self, ids: Tensor, layout: Layout, rows: Tensor | None) -> Tensor:
        size = self._size_for(layout)
        if size is None:
            return self.network.logits(ids, layout, rows)
        return self.network.finish(self._replay(size, ids, layout)[: len(ids)], rows)

    def logits_in_parts(
        self, ids: Tensor, layout: Layout, parts: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        return self.network.logits_in_parts(ids, layout, parts)

    def without_layers(self, skip: Collection[int]) -> ShareableNetwork:
        return RowGraphs(
            self.network.without_layers(skip),
            self._attention,
            self._cache,
            device=self._device,
            max_context=self._max_context,
            shard=self._shard,
        )

    @property
    def embedding(self) -> Tensor:
        return self.network.embedding

    def embed(self, ids: Tensor) -> Tensor:
        return self.network.embed(ids)

    def head(self, hidden: Tensor) -> Tensor:
        return self.network.head(hidden)

    def _size_for(self, layout: Layout) -> RunsSize | None:
        """Return the size of the graph for a pass; None if there is none."""
        assert layout.runs is not None
        rows, seqs = len(layout.positions), len(layout.runs.runs)
        size = next((size for size in runs_sizes(rows) if size.seqs >= seqs), None)
        if size not in self.captured or layout.runs.block_table.numel() > self._max_pages:
            return None
        return size

    def _replay(self, size: RunsSize, ids: Tensor, layout: Layout) -> Tensor:
        assert layout.runs is not None
        inputs, rows = self._inputs, len(ids)
        torch._foreach_copy_(  # one kernel for all three
            [inputs.ids[:rows], inputs.positions[:rows], inputs.slots[:rows]],
            [ids, layout.positions, layout.slots],
        )
        if rows < size.rows:
            inputs.slots[rows : size.rows].fill_(self._scratch_slot)
        self._attention.plan_graph(replace(layout.runs, size=size))
        captured = self.captured[size]
        captured.graph.replay()
        return captured.result

    @property
    def _scratch_slot(self) -> int:
        """The first slot of the page that no sequence owns."""
        return self._cache.num_pages * self._cache.page_size

    @torch.inference_mode()
    def _capture_all(self) -> None:
        """Capture all sizes, the largest first, whose memory smaller ones use again."""
        capture = GraphCapture(self._device, self._shard)
        for rows in reversed(ROWS):
            for size in runs_sizes(rows):
                try:
                    self.captured[size] = self._capture(capture, size)
                except RuntimeError as error:
                    self.captured.clear()
                    log.warning(
                        "CUDA graphs are off: a pass cannot be captured: %s", first_line(error)
                    )
                    return

    def _capture(self, capture: GraphCapture, size: RunsSize) -> CapturedPass:
        """Capture a pass of that size over the page that no sequence owns."""
        counts = np.full(size.seqs, size.rows // size.seqs)
        runs = np.zeros((size.seqs, 4), np.int64)
        runs[:, 0], runs[:, 1] = np.cumsum(counts) - counts, counts
        positions = torch.from_numpy(np.arange(size.rows) % counts[0])
        inputs = self._inputs
        inputs.ids.zero_()
        inputs.positions[: size.rows].copy_(positions)
        inputs.slots[: size.rows].copy_(positions + self._scratch_slot)
        table = torch.full((1, 1), self._cache.num_pages)
        planned = Runs(torch.from_numpy(runs), table, size)
        plain, layout = inputs.layout(planned), inputs.layout(planned)
        plain = replace(plain, runs=replace(planned, size=None))
        self._attention.plan_graph(planned)
        ids = inputs.ids[: size.rows]
        return capture.capture(
            lambda: self.network.run_layers(ids, layout),
            lambda: self.network.run_layers(ids, plain),
        )


def runs_sizes(rows: int) -> list[RunsSize]:
    """Return the sizes of graphs for that many rows, of which the first that fits is the best.

    FlashInfer's kernels take as many rows of a sequence at once as the size has rows for each: with
    a sequence for every row they would read a sequence's keys once for each of its rows.
    """
    padded = next((size for size in ROWS if size >= rows), None)
    if padded is None:
        return []
    return [RunsSize(padded, seqs) for seqs in dict.fromkeys((max(1, padded // 2), padded))]
