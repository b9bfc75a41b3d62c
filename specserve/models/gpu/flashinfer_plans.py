"""Plans of FlashInfer's wrappers: the lists of a pass's pages, copied to the card before it runs.

Knows pages, rows and kinds of layers; no model. A pass that runs by itself has wrappers that take
any lists. One that a graph replays has a wrapper for each of its sizes, whose kernels read the
lists from buffers that stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.models.layout import Runs, RunsSize

WORKSPACE_BYTES = 2**28
"""Room for sums of keys that are divided among blocks; 2**27 is too little."""
SCHEDULE_BYTES = 2**21
"""Room for the schedule of one plan of a graph: FlashInfer's own default is four times that.

256 runs of 64 heads take 2**19 bytes on Hopper.
"""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The sizes and the variant of attention that layers share, for which a plan is made."""

    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    dtype: torch.dtype
    page_dtype: torch.dtype
    scaling: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class PageLists:
    """The rows and pages of a pass's sequences as FlashInfer takes them, pinned on the host."""

    row_starts: Tensor  # [seqs + 1]
    page_starts: Tensor  # [seqs + 1]
    last_lengths: Tensor  # [seqs] positions in the last page of each
    lengths: Tensor  # [seqs]
    pages: Tensor  # [all pages]

    @classmethod
    def from_runs(cls, runs: Runs, page_size: int) -> PageLists:
        """Return the lists of these runs, padded with empty ones to the size of their graph."""
        _, counts, positions, owners = runs.runs.numpy().T
        lengths = positions + counts
        num_pages = -(-lengths // page_size)
        table = runs.block_table.numpy()[owners]
        pages = table[np.arange(table.shape[1]) < num_pages[:, None]]
        padding = np.zeros(0 if runs.size is None else runs.size.seqs - len(counts), np.int64)
        counts, num_pages, lengths = (
            np.concatenate([sizes, padding]) for sizes in (counts, num_pages, lengths)
        )
        lists = (_starts(counts), _starts(num_pages), (lengths - 1) % page_size + 1, lengths, pages)
        joined = torch.from_numpy(np.concatenate(lists).astype(np.int32)).pin_memory()
        return cls(*torch.split(joined, [len(one) for one in lists]))


@dataclass(slots=True)
class GraphBuffers:
    """The lists on the card that the kernels of captured graphs read; all graphs share them."""

    row_starts: Tensor
    page_starts: Tensor
    last_lengths: Tensor
    pages: Tensor

    @classmethod
    def with_room(cls, seqs: int, pages: int, device: torch.device) -> GraphBuffers:
        sizes = (seqs + 1, seqs + 1, seqs, pages)
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))


@dataclass(slots=True)
class Plan:
    """A wrapper for one kind of layer, and the pass that it is planned for.

    A plan is copied to the card from memory of the wrapper, which the next plan overwrites, so
    that must wait for the copy.
    """

    wrapper: Any
    kind: LayerKind
    runs: Runs | None = None
    copied: Any = None  # an event after the copy

    def make(self, runs: Runs, lists: PageLists, page_size: int, device: torch.device) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        kind = self.kind
        # A graph's list of pages is copied within the card; from the host the copy would wait.
        pages = lists.pages if runs.size is None else lists.pages.to(device, non_blocking=True)
        self.wrapper.plan(
            lists.row_starts,
            lists.page_starts,
            pages,
            lists.last_lengths,
            kind.heads,
            kind.kv_heads,
            kind.dim,
            page_size,
            head_dim_vo=kind.v_dim,
            causal=True,
            sm_scale=kind.scaling,
            window_left=-1 if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.softcap,
            q_data_type=kind.dtype,
            kv_data_type=kind.page_dtype,
            non_blocking=True,
            seq_lens=lists.lengths,
        )
        self.runs, self.copied = runs, torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.copied.record(torch.cuda.current_stream(device))


@dataclass(slots=True)
class PlanPair:
    """Two plans for one kind of layer, used in turn: one pass may be planned ahead of another."""

    plans: list[Plan]
    newest: int = 0


@dataclass(slots=True)
class Plans:
    """All plans of a model's attention, made when the first layer of a kind asks for one."""

    make_wrapper: Callable[..., Any]
    page_size: int
    device: torch.device
    buffers: GraphBuffers | None = None  # None: no passes are captured
    _workspace: Tensor = field(init=False)
    _pairs: dict[LayerKind, PlanPair] = field(init=False, default_factory=dict)
    _of_graphs: dict[RunsSize, dict[LayerKind, Plan]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)

    def get(self, runs: Runs, kind: LayerKind) -> Plan:
        """Return the plan for layers of this kind in a pass.

        That of a graph is made here once, and from then on by `plan_graph`.
        """
        if runs.size is None:
            return self._get_planned(runs, kind)
        of_size = self._of_graphs.setdefault(runs.size, {})
        if kind not in of_size:
            of_size[kind] = Plan(self._graph_wrapper(runs.size), kind)
            self._make(of_size[kind], runs)
        return of_size[kind]

    def plan_graph(self, runs: Runs) -> None:
        """Plan the next replay of a graph, for all kinds of layers that were captured."""
        assert runs.size is not None
        lists = PageLists.from_runs(runs, self.page_size)
        for plan in self._of_graphs.get(runs.size, {}).values():
            plan.make(runs, lists, self.page_size, self.device)

    def _get_planned(self, runs: Runs, kind: LayerKind) -> Plan:
        if kind not in self._pairs:
            wrappers = [self.make_wrapper(self._workspace, "NHD") for _ in range(2)]
            self._pairs[kind] = PlanPair([Plan(wrapper, kind) for wrapper in wrappers])
        pair = self._pairs[kind]
        if pair.plans[pair.newest].runs is not runs:
            pair.newest = 1 - pair.newest
            self._make(pair.plans[pair.newest], runs)
        return pair.plans[pair.newest]

    def _make(self, plan: Plan, runs: Runs) -> None:
        lists = PageLists.from_runs(runs, self.page_size)
        plan.make(runs, lists, self.page_size, self.device)

    def _graph_wrapper(self, size: RunsSize) -> Any:
        """Return a wrapper that is planned for passes of a size from now on.

        Its first plan must be for as many rows as the largest of them.
        """
        buffers = self.buffers
        assert buffers is not None
        wrapper = self.make_wrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=buffers.row_starts[: size.seqs + 1],
            paged_kv_indptr_buf=buffers.page_starts[: size.seqs + 1],
            paged_kv_indices_buf=buffers.pages,
            paged_kv_last_page_len_buf=buffers.last_lengths[: size.seqs],
        )
        schedule = torch.empty(SCHEDULE_BYTES, dtype=torch.uint8, device=self.device)
        wrapper.reset_workspace_buffer(self._workspace, schedule)
        return wrapper


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes)])
