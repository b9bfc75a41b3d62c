"""Attention by FlashInfer's kernels for CUDA, which read the pages of the KV cache in place.

Each sequence is one run of rows, however many it has, so prompts, uneven drafts and decoding share
a pass without padding. Not row-invariant. FlashInfer is an optional dependency.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specserve import flashinfer_kernels
from specserve.models.attention import (
    Attention,
    AttentionVariant,
    GroupedAttention,
    Rotation,
    write_cache,
)
from specserve.models.attention_kernels import invariant_kernel
from specserve.models.float8_pages import PageScales, to_float8
from specserve.models.float8_weight import FLOAT8
from specserve.models.gpu.card_kernels import CardKernels, card_kernels
from specserve.models.gpu.flashinfer_plans import GraphBuffers, LayerKind, Plans
from specserve.models.layout import Geometry, Layout, Runs, Writes
from specserve.models.planner import Planner, key_block_size

if TYPE_CHECKING:
    from specserve.models.checkpoints.load import LoadedModel

TYPES = (torch.bfloat16, torch.float16)
WITH_SINKS = ("gpt_oss",)
"""Architectures whose softmax has logits without values."""
UNDIVIDED = 2**31
"""Rows of a run, so that no sequence is divided into several."""
TOLERANCE = 2**-5
"""Error of a trial's results, as a share of the largest."""
TRIAL_LENGTHS, TRIAL_COUNTS = (1300, 421, 17), (1, 5, 17)
"""Keys and rows of a trial's sequences: decoding, verification, a prompt.

Kernels divide the keys of the first among blocks.
"""
TRIAL_WINDOW = 8
TRIAL_SCALES = PageScales(0.5, 3.0)


class FlashInferUnusable(Exception):
    """FlashInfer is not there, fails, or computes something else; says which."""


class FlashInferAttention:
    """FlashInfer's paged attention; the layers of a pass share what is planned for it."""

    run_rows = UNDIVIDED

    def __init__(
        self,
        make_wrapper: Callable[..., Any],
        *,
        page_size: int,
        device: torch.device,
        kernels: CardKernels | None = None,
    ) -> None:
        """Attend with wrappers that `make_wrapper` makes; with `kernels`, also rotate and write."""
        self.page_size, self._kernels = page_size, kernels
        self._plans = Plans(make_wrapper, page_size, device)

    @property
    def rotates(self) -> bool:
        return self._kernels is not None

    def attend(
        self,
        layout: Layout,
        keys: Tensor,
        values: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        variant: AttentionVariant,
        rotation: Rotation | None = None,
    ) -> Tensor:
        assert layout.runs is not None
        if rotation is None:
            write_cache(layout, keys, values, k, v, variant.scales)
        else:
            assert self._kernels is not None
            q = self._kernels.rotate_and_write(
                q, k, v, rotation.table, layout.positions, layout.slots, keys, values
            )
        pools = tuple(pool.view(-1, self.page_size, *pool.shape[1:]) for pool in (keys, values))
        kind = LayerKind(
            q.shape[1],
            pools[0].shape[2],
            pools[0].shape[3],
            pools[1].shape[3],
            q.dtype,
            pools[0].dtype,
            variant.scaling,
            variant.window,
            variant.softcap,
        )
        plan = self._plans.get(layout.runs, kind)
        scales: dict[str, float] = {}
        if keys.dtype == FLOAT8:  # the plan's serve all layers
            scales = {"k_scale": variant.scales.keys, "v_scale": variant.scales.values}
        return plan.wrapper.run(q.contiguous(), pools, **scales)  # type: ignore[no-any-return]

    def make_room(self, *, seqs: int, pages: int, device: torch.device) -> None:
        """Make room for the lists of captured passes of that many sequences and pages."""
        self._plans.buffers = GraphBuffers.with_room(seqs, pages, device)

    def plan_graph(self, runs: Runs) -> None:
        """Plan the next replay of a captured pass."""
        self._plans.plan_graph(runs)


def find_flashinfer(device: torch.device) -> Callable[..., Any]:
    """Return what makes FlashInfer's wrappers. Raises FlashInferUnusable."""
    compiled, installed = flashinfer_kernels.compiled_kernels(), flashinfer_kernels.version()
    if compiled is not None:
        fault = compiled.fault(torch.cuda.get_device_capability(device), installed)
        if fault is not None:
            raise FlashInferUnusable(fault)
    flashinfer_kernels.prepare()
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except Exception as error:  # a build for another torch raises whatever it likes
        raise FlashInferUnusable(f"{type(error).__name__}: {error}") from error
    return partial(BatchPrefillWithPagedKVCacheWrapper, backend=flashinfer_kernels.BACKEND)


def open_flashinfer(
    loaded: LoadedModel,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    page_dtype: torch.dtype | None = None,
) -> FlashInferAttention:
    """Return FlashInfer's attention for a model, after a trial.

    Pages have the model's number format unless `page_dtype` is another.

    Raises FlashInferUnusable if it is not there, fails, or computes something else.
    """
    make_wrapper = find_flashinfer(device)
    if dtype not in TYPES:
        raise FlashInferUnusable("it computes in bfloat16 and float16 only")
    if loaded.config.model_type in WITH_SINKS:
        raise FlashInferUnusable("its kernels know no sinks")
    pages = page_dtype or dtype
    # Of FP8 pages it reads; ours do not write them.
    kernels = card_kernels(device, dtype) if pages == dtype else None
    attention = FlashInferAttention(
        make_wrapper, page_size=page_size, device=device, kernels=kernels
    )
    try:
        error = _error(attention, loaded, page_size, dtype, device, pages)
    except Exception as raised:  # compilers, drivers and kernels raise whatever they like
        raise FlashInferUnusable(f"{type(raised).__name__}: {raised}") from raised
    if not error <= TOLERANCE:
        raise FlashInferUnusable(f"its results are off by {error:.2g} of the largest")
    return attention


def _error(
    attention: FlashInferAttention,
    loaded: LoadedModel,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    page_dtype: torch.dtype,
) -> float:
    """Return how far its results are from the invariant ones on a small batch.

    The largest differences of each kind of layer are added up, as shares of the largest result.
    """
    spec = loaded.spec
    block = key_block_size(spec.kv_heads * min(spec.head_dim, spec.v_head_dim))
    writes = _trial_writes(block, page_size)
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, heads: int, dim: int) -> Tensor:
        return torch.randn(rows, heads, dim, generator=generator).to(dtype).to(device)

    slots, rows = writes.block_table.size * page_size, int(writes.counts.sum())
    keys, k = (random(n, spec.kv_heads, spec.head_dim) for n in (slots, rows))
    values, v = (random(n, spec.kv_heads, spec.v_head_dim) for n in (slots, rows))
    q = random(rows, spec.num_heads, spec.head_dim)

    def attended(way: Attention, variant: AttentionVariant) -> Tensor:
        geometry = Geometry(page_size, spec.kv_heads, block, device, way.run_rows)
        layout = Planner(geometry).lay_out(writes)
        own_keys, own_values = (_copy_as(pool, page_dtype) for pool in (keys, values))
        return way.attend(layout, own_keys, own_values, q, k, v, variant).float()

    errors = []
    for variant in _variants(loaded):
        if page_dtype == FLOAT8:
            variant = replace(variant, scales=TRIAL_SCALES)
        expected = attended(GroupedAttention(invariant_kernel), variant)
        error = (attended(attention, variant) - expected).abs().max()
        errors.append(float(error / expected.abs().max()))
    return sum(errors)


def _trial_writes(block: int, page_size: int) -> Writes:
    """Return the writes of a trial's sequences, into pages that lie in no order."""
    lengths, counts = np.array(TRIAL_LENGTHS), np.array(TRIAL_COUNTS)
    width = -(-max(TRIAL_LENGTHS) // block) * block // page_size + 1
    pages = np.random.default_rng(0).permutation(len(counts) * width)
    return Writes(lengths - counts, counts, pages.reshape(len(counts), width))


def _copy_as(pool: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != FLOAT8:
        return pool.clone()
    return to_float8(pool, 1.0).view(FLOAT8)


def _variants(loaded: LoadedModel) -> tuple[AttentionVariant, ...]:
    """Return the kinds of attention that a model's layers may have, with a narrow window."""
    softcap = getattr(loaded.config, "attn_logit_softcapping", None)
    plain = AttentionVariant(loaded.spec.head_dim**-0.5, None, softcap)
    window = getattr(loaded.config, "sliding_window", None)
    return (plain,) if window is None else (plain, replace(plain, window=TRIAL_WINDOW))
