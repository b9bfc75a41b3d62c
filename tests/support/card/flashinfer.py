"""A stand-in of FlashInfer on emulated cards, with the checks of the original.

The checks are those of its `prefill.py` and `sampling.py` of August 2026.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from specserve.sampling.truncation import renormaliser_of
from tests.support.card.tensors import CARDS, CardTensor, launch


class FlashInferWrapper:
    """`BatchPrefillWithPagedKVCacheWrapper` as far as we use it."""

    error = 0.0
    """Wrong numbers: what is added to every result."""
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert isinstance(float_workspace_buffer, CardTensor)
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self._planned: tuple[Any, ...] | None = None

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
    ) -> None:
        lists = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(given.dtype == torch.int32 for given in lists), "indices are int32"
        # Lists on a card are read back, which waits.
        assert not any(isinstance(given, CardTensor) for given in lists)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        assert num_qo_heads % num_kv_heads == 0
        assert q_data_type in self.dtypes, "no kernel for this type"
        assert kv_data_type == q_data_type
        assert head_dim_qk in (16, 64, 128, 256), "no kernel for heads of this size"
        assert causal
        cards = CARDS[-1]
        for given in lists:  # `to(device, non_blocking=...)` each
            if given is paged_kv_indices:
                assert given.untyped_storage().data_ptr() in cards.pinned, "a copy that waits"
        self._planned = (
            *(given.tolist() for given in lists),
            (num_qo_heads, head_dim_qk),
            (page_size, num_kv_heads, head_dim_vo or head_dim_qk),
            (sm_scale or head_dim_qk**-0.5, window_left, logits_soft_cap or 0.0),
        )

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        assert self._planned is not None, "plan info is not initialized"
        starts, page_starts, pages, last, (heads, dim), (size, kv_heads, v_dim), how = self._planned
        keys, values = paged_kv_cache
        assert q.is_contiguous()
        assert q.shape == (starts[-1], heads, dim), "q does not match qo_indptr"
        assert keys.shape[1:] == (size, kv_heads, dim)
        assert values.shape[1:] == (size, kv_heads, v_dim)
        plan = (starts, page_starts, pages, last, how)

        def batch_prefill(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if not cards.has_values:
                return q.new_empty(*q.shape[:2], values.shape[-1])
            return _attend(q, keys, values, plan) + self.error

        cards = CARDS[-1]
        cards.ledger.add_paged_attention(*_work(plan, q, keys, values))
        out: Tensor = launch(cards, batch_prefill, (q, keys, values), {})
        return out


def _work(plan: Any, q: Tensor, keys: Tensor, values: Tensor) -> tuple[int, int]:
    """Return the bytes of keys and values that a kernel reads, and its operations."""
    starts, page_starts, _, last, _ = plan
    size = keys.shape[1]
    lengths = [
        (stop - start - 1) * size + rest
        for (start, stop), rest in zip(pairwise(page_starts), last, strict=True)
    ]
    slot_bytes = (keys[0, 0].numel() + values[0, 0].numel()) * keys.element_size()
    seen = sum(
        (stop - start) * n for (start, stop), n in zip(pairwise(starts), lengths, strict=True)
    )
    return sum(lengths) * slot_bytes, 4 * seen * q.shape[1] * q.shape[2]


def _attend(q: Tensor, keys: Tensor, values: Tensor, plan: Any) -> Tensor:
    starts, page_starts, pages, last, (scaling, window_left, softcap) = plan
    out = q.new_empty(*q.shape[:2], values.shape[-1])
    shared = q.shape[1] // keys.shape[2]
    for number, size in enumerate(last):
        rows = slice(starts[number], starts[number + 1])
        own = pages[page_starts[number] : page_starts[number + 1]]
        length = (len(own) - 1) * keys.shape[1] + size
        k, v = (
            pool[own].flatten(0, 1)[:length].float().repeat_interleave(shared, 1)
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
    *, error: float = 0.0, dtypes: tuple[torch.dtype, ...] = FlashInferWrapper.dtypes
) -> Iterator[None]:
    """Let `import flashinfer` find the stand-in."""

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
    modules = {"flashinfer": module, "flashinfer.sampling": sampling}
    try:
        with mock.patch.dict(sys.modules, modules):
            yield
    finally:
        renormaliser_of.cache_clear()
