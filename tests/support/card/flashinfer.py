"""A stand-in of FlashInfer on emulated cards, with the checks of the original.

The checks are from its `prefill.py` and `sampling.py` of August 2026.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from specserve.models.gpu import row_graphs
from specserve.sampling.truncation import renormaliser_of
from tests.support.card.tensors import CARDS, CardTensor, launch

FEW_ROWS = (4, 16)
"""Rows of graphs, each of which takes a tenth of a second or more to capture here."""


class FlashInferWrapper:
    """`BatchPrefillWithPagedKVCacheWrapper` as far as we use it."""

    error = 0.0
    """Wrong numbers: what is added to every result."""
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
    ) -> None:
        assert isinstance(float_workspace_buffer, CardTensor)
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        assert backend == "fa2", "on Hopper another one is chosen"
        self._plan: Plan | None = None
        self._buffers: Any = None
        self._max_rows: int | None = None
        if not use_cuda_graph:
            return
        buffers = (
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        )
        for buffer in buffers:
            assert isinstance(buffer, CardTensor)
            assert buffer.dtype == torch.int32
        self._buffers = buffers
        rows, pages, _, last = self._buffers
        assert len(rows) == len(pages) == len(last) + 1, "batch_size + 1"

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        assert isinstance(int_workspace_buffer, CardTensor)
        assert int_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        head_dim_vo: int | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
        seq_lens: Tensor | None = None,
    ) -> None:
        cards = CARDS[-1]
        assert not cards.recordings, "plan() cannot be used in a CUDA graph"
        lists = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        assert all(given.dtype == torch.int32 for given in (*lists, paged_kv_indices))
        # Lists on a card are read back, which waits; so does a copy that is not of pinned memory.
        assert not any(isinstance(given, CardTensor) for given in lists)
        from_host = [*lists, *([] if seq_lens is None else [seq_lens])]
        if self._buffers is None:
            from_host.append(paged_kv_indices)
        for given in from_host:
            assert given.untyped_storage().data_ptr() in cards.pinned, "a copy that waits"
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        assert num_qo_heads % num_kv_heads == 0
        assert q_data_type in self.dtypes, "no kernel for this type"
        assert kv_data_type in (q_data_type, torch.float8_e4m3fn)
        assert head_dim_qk in (16, 64, 128, 256), "no kernel for heads of this size"
        assert causal
        how = (sm_scale or head_dim_qk**-0.5, window_left, logits_soft_cap or 0.0)
        sizes = (num_qo_heads, head_dim_qk, page_size, num_kv_heads, head_dim_vo or head_dim_qk)
        pages = torch.zeros(len(paged_kv_indices), dtype=torch.int32)
        if cards.has_values:
            held = paged_kv_indices
            pages = held.host if isinstance(held, CardTensor) else held
        plan = Plan(
            qo_indptr, paged_kv_indptr, pages, paged_kv_last_page_len, how, sizes, kv_data_type
        )
        if self._buffers is not None:
            self._plan_graph(plan, paged_kv_indices)
        self._plan = plan

    def _plan_graph(self, plan: Plan, pages: Tensor) -> None:
        """Copy the lists into the buffers; what a graph has baked in must not change."""
        assert self._buffers is not None
        rows = int(plan.row_starts[-1])
        if self._max_rows is None:
            self._max_rows = rows
        row_starts, page_starts, all_pages, last = self._buffers
        assert rows <= self._max_rows, "more rows than in the first plan"
        assert len(plan.last) == len(last), "the batch size is fixed"
        assert len(pages) <= len(all_pages), "more pages than the buffer has room for"
        assert isinstance(pages, CardTensor), "a copy that waits"
        assert self._plan is None or (self._plan.how, self._plan.sizes) == (plan.how, plan.sizes)
        row_starts.copy_(plan.row_starts, non_blocking=True)
        page_starts.copy_(plan.page_starts, non_blocking=True)
        last.copy_(plan.last, non_blocking=True)
        all_pages[: len(pages)].copy_(pages, non_blocking=True)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> Tensor:
        plan = self._plan
        assert plan is not None, "plan info is not initialized"
        heads, dim, size, kv_heads, v_dim = plan.sizes
        keys, values = paged_kv_cache
        assert q.is_contiguous()
        rows = int(plan.row_starts[-1]) if self._buffers is None else self._max_rows
        assert q.shape == (rows, heads, dim), "q does not match qo_indptr"
        assert keys.dtype == values.dtype == plan.page_dtype, "the dtype of the kv_cache"
        assert keys.shape[1:] == (size, kv_heads, dim)
        assert values.shape[1:] == (size, kv_heads, v_dim)
        cards, lists = CARDS[-1], self._buffers
        kernel = PagedKernel(self, k_scale or 1.0)
        if lists is None:
            lists = (plan.row_starts, plan.page_starts, plan.pages, plan.last)
            kernel.lists, lists = lists, ()
        cards.ledger.add_paged_attention(*kernel.work(q, keys, values))
        out: Tensor = launch(cards, kernel, (q, keys, values, *lists), {})
        if v_scale is not None and v_scale != 1.0:
            out *= v_scale
        return out


@dataclass(frozen=True, slots=True)
class Plan:
    """The lists that a wrapper was planned for, on the host."""

    row_starts: Tensor
    page_starts: Tensor
    pages: Tensor
    last: Tensor
    how: tuple[float, int, float]
    sizes: tuple[int, ...]
    page_dtype: torch.dtype | None


class PagedKernel:
    """One launch: of a graph, it reads its lists from the card's memory at each replay."""

    __name__ = "batch_prefill"

    def __init__(self, wrapper: FlashInferWrapper, k_scale: float) -> None:
        self._wrapper, plan = wrapper, wrapper._plan
        assert plan is not None
        scaling, *others = plan.how
        self._how: tuple[Any, ...] = (scaling * k_scale, *others)
        self.lists: tuple[Tensor, ...] = ()

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, *buffers: Tensor) -> Tensor:
        if not CARDS[-1].has_values:
            return q.new_empty(*q.shape[:2], values.shape[-1])
        lists = [given.tolist() for given in (buffers or self.lists)]
        return _attend(q, keys, values, (*lists, self._how)) + self._wrapper.error

    def work(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[int, int]:
        """Return the bytes of keys and values that the kernel reads, and its operations."""
        plan = self._wrapper._plan
        assert plan is not None
        lists = (plan.row_starts, plan.page_starts, plan.pages, plan.last)
        return _work((*(given.tolist() for given in lists), plan.how), q, keys, values)


def _work(plan: Any, q: Tensor, keys: Tensor, values: Tensor) -> tuple[int, int]:
    """Return the bytes of keys and values that a kernel reads, and its operations."""
    starts, page_starts, _, last, _ = plan
    size = keys.shape[1]
    lengths = [
        max(stop - start - 1, 0) * size + rest * (stop > start)
        for (start, stop), rest in zip(pairwise(page_starts), last, strict=True)
    ]
    slot_bytes = (keys[0, 0].numel() + values[0, 0].numel()) * keys.element_size()
    seen = sum(
        (stop - start) * n for (start, stop), n in zip(pairwise(starts), lengths, strict=True)
    )
    return sum(lengths) * slot_bytes, 4 * seen * q.shape[1] * q.shape[2]


def _attend(q: Tensor, keys: Tensor, values: Tensor, plan: Any) -> Tensor:
    starts, page_starts, pages, last, (scaling, window_left, softcap) = plan
    out = q.new_zeros(*q.shape[:2], values.shape[-1])
    shared = q.shape[1] // keys.shape[2]
    for number, size in enumerate(last):
        rows = slice(starts[number], starts[number + 1])
        own = pages[page_starts[number] : page_starts[number + 1]]
        if not own:
            continue
        length = (len(own) - 1) * keys.shape[1] + size
        k, v = (
            pool[own].float().flatten(0, 1)[:length].repeat_interleave(shared, 1)
            for pool in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * scaling
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        count = rows.stop - rows.start
        position = torch.arange(length - count, length)[:, None]
        key = torch.arange(length)
        hidden = key > position
        if window_left >= 0:
            hidden |= key < position - window_left
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


def top_k_renorm_probs(probs: Tensor, top_k: Tensor) -> Tensor:
    assert isinstance(probs, CardTensor)
    assert probs.dtype == torch.float32
    assert top_k.dtype == torch.int32
    assert top_k.shape == probs.shape[:1]

    def renormalised(p: Tensor, k: Tensor) -> Tensor:
        ranked = p.sort(dim=-1, descending=True).values
        least = ranked.gather(1, k[:, None].long() - 1)
        kept = p.where(p >= least, torch.zeros(()))
        return kept / kept.sum(-1, keepdim=True)

    out: Tensor = launch(CARDS[-1], renormalised, (probs, top_k), {})
    return out


def top_p_renorm_probs(probs: Tensor, top_p: Tensor) -> Tensor:
    assert isinstance(probs, CardTensor)
    assert top_p.dtype == torch.float32
    assert top_p.shape == probs.shape[:1]

    def renormalised(p: Tensor, mass: Tensor) -> Tensor:
        ranked = p.sort(dim=-1, descending=True).values
        before = ranked.double().cumsum(-1) - ranked
        num_kept = (before < mass[:, None]).sum(-1, keepdim=True).clamp(min=1)
        kept = p.where(p >= ranked.gather(1, num_kept - 1), torch.zeros(()))
        return kept / kept.sum(-1, keepdim=True)

    out: Tensor = launch(CARDS[-1], renormalised, (probs, top_p), {})
    return out


@contextmanager
def installed(
    *,
    error: float = 0.0,
    dtypes: tuple[torch.dtype, ...] = FlashInferWrapper.dtypes,
    graph_rows: tuple[int, ...] = FEW_ROWS,
    sampling_is_compiled: bool = True,
) -> Iterator[None]:
    """Let `import flashinfer` find the stand-in, and graphs be captured for that many rows."""

    class Wrapper(FlashInferWrapper):
        pass

    Wrapper.error, Wrapper.dtypes = error, dtypes
    module: Any = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    sampling: Any = types.ModuleType("flashinfer.sampling")
    sampling.top_k_renorm_probs, sampling.top_p_renorm_probs = (
        top_k_renorm_probs,
        top_p_renorm_probs,
    )
    renormaliser_of.cache_clear()
    jit: Any = types.ModuleType("flashinfer.jit.sampling")
    jit.gen_sampling_module = lambda: types.SimpleNamespace(is_compiled=sampling_is_compiled)
    modules = {
        "flashinfer": module,
        "flashinfer.jit": types.ModuleType("flashinfer.jit"),
        "flashinfer.jit.sampling": jit,
        "flashinfer.sampling": sampling,
    }
    try:
        with (
            mock.patch.dict(sys.modules, modules),
            mock.patch.object(row_graphs, "ROWS", graph_rows),
        ):
            yield
    finally:
        renormaliser_of.cache_clear()
