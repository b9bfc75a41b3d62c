"""Attention by FlashInfer's kernels for CUDA, which read the pages of the KV cache in place.

Each sequence is one run of rows, however many it has, so prompts, uneven drafts and decoding share
a pass without padding. Not row-invariant. FlashInfer is an optional dependency.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specserve.models.attention import (
    Attention,
    AttentionVariant,
    GroupedAttention,
    Rotation,
    invariant_kernel,
    write_cache,
)
from specserve.models.card_kernels import CardKernels, card_kernels
from specserve.models.layout import Geometry, Layout, Runs, Writes
from specserve.models.planner import Planner, key_block_size

if TYPE_CHECKING:
    from specserve.models.checkpoints.load import LoadedModel

TYPES = (torch.bfloat16, torch.float16)
WITH_SINKS = ("gpt_oss",)
"""Architectures whose softmax has logits without values."""
WORKSPACE_BYTES = 2**28  # sums of keys that are divided among blocks; 2**27 is too little
UNDIVIDED = 2**31
"""Rows of a run, so that no sequence is divided into several."""
TOLERANCE = 2**-5
"""Error of a trial's results, as a share of the largest."""
TRIAL_LENGTHS, TRIAL_COUNTS = (1300, 421, 17), (1, 5, 17)
"""Keys and rows of a trial's sequences: decoding, verification, a prompt.

Kernels divide the keys of the first among blocks.
"""
TRIAL_WINDOW = 8


class FlashInferUnusable(Exception):
    """FlashInfer is not there, fails, or computes something else; says which."""


@dataclass(slots=True)
class _Plan:
    """FlashInfer's wrapper for one kind of layer, and the pass that it is planned for.

    A plan is copied to the card from memory of the wrapper, which the next plan overwrites, so
    that must wait for the copy.
    """

    wrapper: Any
    runs: Runs | None = None
    copied: Any = None  # an event behind the copy


@dataclass(slots=True)
class _Plans:
    """Two plans for one kind of layer, used in turn: one pass may be planned ahead of another."""

    plans: list[_Plan]
    newest: int = 0


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
        """Attend with wrappers of that class; with `kernels`, also rotate and write."""
        self._make_wrapper, self.page_size = make_wrapper, page_size
        self._kernels = kernels
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._device = device
        self._plans: dict[tuple[float, int | None, float | None], _Plans] = {}

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
            write_cache(layout, keys, values, k, v)
        else:
            assert self._kernels is not None
            q = self._kernels.rotate_and_write(
                q, k, v, rotation.table, layout.positions, layout.slots, keys, values
            )
        pools = tuple(pool.view(-1, self.page_size, *pool.shape[1:]) for pool in (keys, values))
        plan = self._planned(layout.runs, q, pools, variant)
        return plan.wrapper.run(q.contiguous(), pools)  # type: ignore[no-any-return]

    def _planned(
        self, runs: Runs, q: Tensor, pools: tuple[Tensor, ...], variant: AttentionVariant
    ) -> _Plan:
        """Return the plan for layers of this kind, made for this pass."""
        key = (variant.scaling, variant.window, variant.softcap)
        if key not in self._plans:
            wrappers = [self._make_wrapper(self._workspace, "NHD") for _ in range(2)]
            self._plans[key] = _Plans([_Plan(wrapper) for wrapper in wrappers])
        both = self._plans[key]
        if both.plans[both.newest].runs is runs:
            return both.plans[both.newest]
        both.newest = 1 - both.newest
        plan = both.plans[both.newest]
        if plan.copied is not None:
            plan.copied.synchronize()
        row_starts, page_starts, pages, last = _page_lists(runs, self.page_size)
        plan.wrapper.plan(
            row_starts,
            page_starts,
            pages.pin_memory(),
            last,
            q.shape[1],
            pools[0].shape[2],
            pools[0].shape[3],
            self.page_size,
            head_dim_vo=pools[1].shape[3],
            causal=True,
            sm_scale=variant.scaling,
            window_left=-1 if variant.window is None else variant.window - 1,
            logits_soft_cap=variant.softcap,
            q_data_type=q.dtype,
            kv_data_type=pools[0].dtype,
            non_blocking=True,
        )
        plan.runs, plan.copied = runs, torch.cuda.Event()  # type: ignore[no-untyped-call]
        plan.copied.record(torch.cuda.current_stream(self._device))
        return plan


def _page_lists(runs: Runs, page_size: int) -> tuple[Tensor, ...]:
    """Return row starts, page starts, page numbers and sizes of last pages, on the host."""
    _, counts, positions, owners = runs.runs.numpy().T
    lengths = positions + counts
    num_pages = -(-lengths // page_size)
    table = runs.block_table.numpy()[owners]
    pages = table[np.arange(table.shape[1]) < num_pages[:, None]]
    lists = (_starts(counts), _starts(num_pages), pages, (lengths - 1) % page_size + 1)
    return tuple(torch.from_numpy(array.astype(np.int32)) for array in lists)


def _starts(sizes: Any) -> Any:
    return np.concatenate([[0], np.cumsum(sizes)])


def find_flashinfer() -> Callable[..., Any]:
    """Return the class of FlashInfer's wrappers. Raises FlashInferUnusable."""
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except Exception as error:  # a build for another torch raises whatever it likes
        raise FlashInferUnusable(f"{type(error).__name__}: {error}") from error
    return BatchPrefillWithPagedKVCacheWrapper  # type: ignore[no-any-return]


def open_flashinfer(
    loaded: LoadedModel, page_size: int, dtype: torch.dtype, device: torch.device
) -> FlashInferAttention:
    """Return FlashInfer's attention for a model, after a trial.

    Raises FlashInferUnusable if it is not there, fails, or computes something else.
    """
    make_wrapper = find_flashinfer()
    if dtype not in TYPES:
        raise FlashInferUnusable("it computes in bfloat16 and float16 only")
    if loaded.config.model_type in WITH_SINKS:
        raise FlashInferUnusable("its kernels know no sinks")
    kernels = card_kernels(device, dtype)
    attention = FlashInferAttention(
        make_wrapper, page_size=page_size, device=device, kernels=kernels
    )
    try:
        error = _error(attention, loaded, page_size, dtype, device)
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
) -> float:
    """Return how far its results are from the invariant ones on a small batch.

    The largest differences of each kind of layer are added up, as shares of the largest result.
    """
    spec = loaded.spec
    lengths, counts = np.array(TRIAL_LENGTHS), np.array(TRIAL_COUNTS)
    block = key_block_size(spec.kv_heads * min(spec.head_dim, spec.v_head_dim))
    width = -(-max(TRIAL_LENGTHS) // block) * block // page_size + 1
    pages = np.random.default_rng(0).permutation(len(counts) * width)
    writes = Writes(lengths - counts, counts, pages.reshape(len(counts), width))
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, heads: int, dim: int) -> Tensor:
        return torch.randn(rows, heads, dim, generator=generator).to(dtype).to(device)

    slots, rows = len(counts) * width * page_size, int(counts.sum())
    keys, k = (random(n, spec.kv_heads, spec.head_dim) for n in (slots, rows))
    values, v = (random(n, spec.kv_heads, spec.v_head_dim) for n in (slots, rows))
    q = random(rows, spec.num_heads, spec.head_dim)

    def attended(way: Attention, variant: AttentionVariant) -> Tensor:
        geometry = Geometry(page_size, spec.kv_heads, block, device, way.run_rows)
        layout = Planner(geometry).lay_out(writes)
        return way.attend(layout, keys.clone(), values.clone(), q, k, v, variant).float()

    errors = []
    for variant in _variants(loaded):
        expected = attended(GroupedAttention(invariant_kernel), variant)
        error = (attended(attention, variant) - expected).abs().max()
        errors.append(float(error / expected.abs().max()))
    return sum(errors)


def _variants(loaded: LoadedModel) -> tuple[AttentionVariant, ...]:
    """Return the kinds of attention that a model's layers may have, with a narrow window."""
    softcap = getattr(loaded.config, "attn_logit_softcapping", None)
    plain = AttentionVariant(loaded.spec.head_dim**-0.5, None, softcap)
    window = getattr(loaded.config, "sliding_window", None)
    return (plain,) if window is None else (plain, replace(plain, window=TRIAL_WINDOW))
