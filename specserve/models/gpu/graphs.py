"""Captured CUDA graphs for passes of few rows a sequence, padded to a few sizes of shape."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specserve.errors import first_line
from specserve.models.gpu.graph_capture import GraphCapture
from specserve.models.hidden_taps import HiddenTaps
from specserve.models.layout import AttentionMask, Geometry, Layout, Writes
from specserve.models.network import ShareableNetwork
from specserve.models.planner import MAX_BATCHED_QUERIES

log = logging.getLogger(__name__)

SMALLEST_CONTEXT = 256
MAX_GRAPH_BYTES = 2**30
"""Memory of the graphs' inputs and outputs, from which on no other shape is captured."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The sizes that a captured graph is made for."""

    seqs: int
    queries: int
    context: int


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    ids: Tensor
    layout: Layout
    logits: Tensor
    tapped: Tensor | None  # what the taps get of each replay


def pad_to_bucket(writes: Writes, geometry: Geometry) -> Writes | None:
    """Return the pass padded to a bucketed shape; None unless all sequences write equally few rows.

    Sequences are padded by repeating the last one, which writes the same values to the same slots
    again.
    """
    queries = int(writes.counts[0])
    if queries > MAX_BATCHED_QUERIES or (writes.counts != queries).any():
        return None
    seqs = 1 << (len(writes.counts) - 1).bit_length()
    context = geometry.context(
        max(SMALLEST_CONTEXT, 1 << (int(writes.lengths.max()) - 1).bit_length())
    )
    rows = np.minimum(np.arange(seqs), len(writes.counts) - 1)
    missing = geometry.num_pages(context) - writes.block_table.shape[1]
    # Any page will do as padding: no query sees it.
    block_table = np.pad(writes.block_table[rows], ((0, 0), (0, max(0, missing))))
    return Writes(writes.starts[rows], writes.counts[rows], block_table, context)


class GraphedNetwork:
    """A network that replays a captured graph of a pass where one fits, and else runs the pass.

    A model that cannot be captured runs all its passes, and so do shapes for whose graphs there is
    no memory left.
    """

    def __init__(
        self, network: ShareableNetwork, device: torch.device, taps: HiddenTaps | None = None
    ) -> None:
        self.network, self.run_rows, self.device = network, None, device
        self._taps = taps
        self.captured: dict[GraphShape, CapturedGraph] = {}
        self._num_bytes = 0  # of the tensors that belong to the graphs
        self._is_capturable, self._capture = True, GraphCapture(device)

    def logits(self, ids: Tensor, layout: Layout, rows: Tensor | None) -> Tensor:
        group = layout.groups[0]
        if rows is not None or not group.is_bucketed:
            return self.network.logits(ids, layout, rows)
        key = GraphShape(group.seqs, group.queries, group.context)
        if key not in self.captured and self._is_capturable and self._num_bytes < MAX_GRAPH_BYTES:
            self._try_to_capture(key, ids, layout)
        captured = self.captured.get(key)
        if captured is None:
            return self.network.logits(ids, layout, None)
        _refill(captured, ids, layout)
        captured.graph.replay()
        if self._taps is not None and captured.tapped is not None:
            self._taps.rows = captured.tapped.clone()
        return captured.logits.clone()  # the graph's own output is overwritten by its next replay

    def logits_in_parts(
        self, ids: Tensor, layout: Layout, parts: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        return self.network.logits_in_parts(ids, layout, parts)

    def without_layers(self, skip: Collection[int]) -> ShareableNetwork:
        return GraphedNetwork(self.network.without_layers(skip), self.device)

    @property
    def embedding(self) -> Tensor:
        return self.network.embedding

    def embed(self, ids: Tensor) -> Tensor:
        return self.network.embed(ids)

    def head(self, hidden: Tensor) -> Tensor:
        return self.network.head(hidden)

    def _try_to_capture(self, key: GraphShape, ids: Tensor, layout: Layout) -> None:
        """Capture a pass; what torch or a kernel refuses turns graphs off for this network."""
        ids, layout = ids.clone(), _clone(layout)

        def run() -> Tensor:
            return self.network.logits(ids, _with_fresh_mask(layout), None)

        try:
            captured = self._capture.capture(run, run)
        except RuntimeError as error:
            self._is_capturable = False
            log.warning("CUDA graphs are off: a pass cannot be captured: %s", first_line(error))
            return
        tapped = None if self._taps is None else self._taps.rows  # of the pass that was captured
        self.captured[key] = CapturedGraph(captured.graph, ids, layout, captured.result, tapped)
        self._num_bytes += captured.result.nbytes + sum(
            tensor.nbytes for tensor in _tensors(layout)
        )


def _tensors(layout: Layout) -> tuple[Tensor, ...]:
    group = layout.groups[0]
    return (
        layout.positions,
        layout.slots,
        group.pages.gather,
        group.pages.device_block_table,
        group.last_keys,
    )


def _refill(captured: CapturedGraph, ids: Tensor, layout: Layout) -> None:
    captured.ids.copy_(ids)
    for ours, theirs in zip(_tensors(captured.layout), _tensors(layout), strict=True):
        ours.copy_(theirs)


def _clone(layout: Layout) -> Layout:
    positions, slots, gather, block_table, last_keys = (
        tensor.clone() for tensor in _tensors(layout)
    )
    pages = replace(layout.groups[0].pages, device_block_table=block_table, gather=gather)
    return Layout(positions, slots, (replace(layout.groups[0], pages=pages, last_keys=last_keys),))


def _with_fresh_mask(layout: Layout) -> Layout:
    """Return the same layout with a mask that has cached nothing.

    Inside a graph the mask must be computed from the positions again.
    """
    group = layout.groups[0]
    return Layout(
        layout.positions,
        layout.slots,
        (
            replace(
                group,
                mask=AttentionMask(group.last_keys.unsqueeze(0), group.pages.keys),
                pass_index=0,
            ),
        ),
    )
