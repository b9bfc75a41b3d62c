"""Captured CUDA graphs for the passes that recur: few rows a sequence, sequences and contexts rounded up to a handful of sizes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specserve.models.layout import FEW_QUERIES, Geometry, Layout, Sight, Writes
from specserve.models.network import Lending

SMALLEST_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class Shape:
    seqs: int
    queries: int
    context: int


@dataclass(frozen=True, slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    ids: Tensor
    layout: Layout
    logits: Tensor


def round_up(writes: Writes, geometry: Geometry) -> Writes | None:
    """The pass padded to a shape that recurs, if its sequences all write the same few rows; else None.

    Sequences are padded by repeating the last one, which writes the same values to the same slots again.
    """
    queries = int(writes.counts[0])
    if queries > FEW_QUERIES or (writes.counts != queries).any():
        return None
    seqs = 1 << (len(writes.counts) - 1).bit_length()
    context = geometry.context(
        max(SMALLEST_CONTEXT, 1 << (int(writes.lengths.max()) - 1).bit_length())
    )
    rows = np.minimum(np.arange(seqs), len(writes.counts) - 1)
    missing = geometry.num_pages(context) - writes.table.shape[1]
    table = np.pad(
        writes.table[rows], ((0, 0), (0, max(0, missing)))
    )  # any page will do, no query sees it
    return Writes(writes.starts[rows], writes.counts[rows], table, context)


class GraphedNetwork:
    """Replays a captured pass where one fits, and runs the wrapped network where none does."""

    def __init__(self, network: Lending) -> None:
        self.network = network
        self.captured: dict[Shape, Captured] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def logits(self, ids: Tensor, layout: Layout, wanted: Tensor | None) -> Tensor:
        group = layout.groups[0]
        if wanted is not None or not group.rounded:
            return self.network.logits(ids, layout, wanted)
        key = Shape(group.seqs, group.queries, group.context)
        if key not in self.captured:
            self.captured[key] = self._capture(ids, layout)
        captured = self.captured[key]
        _refill(captured, ids, layout)
        captured.graph.replay()
        return captured.logits.clone()  # the graph's own output is overwritten by its next replay

    def without(self, skip: Collection[int]) -> Lending:
        return GraphedNetwork(self.network.without(skip))

    def embed(self, ids: Tensor) -> Tensor:
        return self.network.embed(ids)

    def head(self, hidden: Tensor) -> Tensor:
        return self.network.head(hidden)

    def _capture(self, ids: Tensor, layout: Layout) -> Captured:
        """Two passes on a side stream warm the kernels up. They write what the replay writes again: a step is idempotent."""
        ids, layout = ids.clone(), _cloned(layout)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.network.logits(ids, _unseen(layout), None)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits = self.network.logits(ids, _unseen(layout), None)
        return Captured(graph, ids, layout, logits)


def _tensors(layout: Layout) -> tuple[Tensor, ...]:
    group = layout.groups[0]
    return (
        layout.positions,
        layout.slots,
        group.pages.gather,
        group.pages.device_table,
        group.positions,
    )


def _refill(captured: Captured, ids: Tensor, layout: Layout) -> None:
    captured.ids.copy_(ids)
    for ours, theirs in zip(_tensors(captured.layout), _tensors(layout), strict=True):
        ours.copy_(theirs)


def _cloned(layout: Layout) -> Layout:
    positions, slots, gather, table, queries = (tensor.clone() for tensor in _tensors(layout))
    pages = replace(layout.groups[0].pages, device_table=table, gather=gather)
    return Layout(positions, slots, (replace(layout.groups[0], pages=pages, positions=queries),))


def _unseen(layout: Layout) -> Layout:
    """The same tensors with nothing remembered of who sees what: inside a graph that must be computed anew from the positions."""
    group = layout.groups[0]
    return Layout(
        layout.positions,
        layout.slots,
        (replace(group, sight=Sight(group.positions.unsqueeze(0), group.pages.keys), turn=0),),
    )
