"""Attention of packed rows over the paged KV cache, by a kernel. Knows rows and slots; no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from specserve.models.float8_pages import STORED_AS, UNSCALED, PageScales, to_float8
from specserve.models.float8_weight import FLOAT8
from specserve.models.layout import AttentionGroup, Layout


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """The additions of an architecture to plain causal attention."""

    scaling: float
    window: int | None = None  # keys seen, the query's own included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads] a logit that takes probability and gives no value
    scales: PageScales = UNSCALED  # of pages in FP8


class Kernel(Protocol):
    """An attention function: q [seqs * queries, heads, dim] over pools [slots, kv_heads, dim]."""

    def __call__(
        self,
        group: AttentionGroup,
        keys: Tensor,
        values: Tensor,
        q: Tensor,
        variant: AttentionVariant,
    ) -> Tensor:
        """Attend one group and return a tensor shaped as q."""
        ...


class Rotation:
    """The rotary angles of a pass's rows."""

    def __init__(self, table: Tensor, positions: Tensor) -> None:
        self.table = table  # [all positions, 2, 1, dim] cosines, and sines as `apply` takes them
        self._positions = positions

    @cached_property
    def _angles(self) -> tuple[Tensor, ...]:  # [rows, 1, dim] both
        return self.table.index_select(0, self._positions).unbind(1)

    def apply(self, x: Tensor) -> Tensor:  # [rows, heads, dim]
        """Return the heads rotated: sines carry the sign of the rotated half."""
        cosines, sines = self._angles
        return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), sines)


class Attention(Protocol):
    """A way to attend over the KV cache."""

    @property
    def rotates(self) -> bool:
        """Queries and keys are rotated by itself, so that `attend` takes a rotation."""
        ...

    @property
    def run_rows(self) -> int | None:
        """Rows of a run of the layout; None: it attends in groups."""
        ...

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
    ) -> Tensor:  # [rows, heads, dim]
        """Write k and v [rows, kv_heads, dim] of this pass into the KV cache, then attend."""
        ...


class GroupedAttention:
    """Attention of groups of sequences, by a kernel."""

    rotates, run_rows = False, None

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

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
        assert rotation is None
        scales = variant.scales
        write_cache(layout, keys, values, k, v, scales)
        if scales.keys != 1.0:
            variant = replace(variant, scaling=variant.scaling * scales.keys)
        out = attend_cached(layout.groups, keys, values, q, variant=variant, kernel=self.kernel)
        return out if scales.values == 1.0 else out * scales.values


def write_cache(
    layout: Layout, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, scales: PageScales
) -> None:
    """Write k and v [rows, kv_heads, dim] of a pass into the pools of a layer."""
    if keys.dtype == FLOAT8:
        k, v = to_float8(k, scales.keys), to_float8(v, scales.values)
        keys, values = keys.view(STORED_AS), values.view(STORED_AS)
    keys.index_copy_(0, layout.slots, k)
    values.index_copy_(0, layout.slots, v)


def attend_cached(
    groups: Sequence[AttentionGroup],
    keys: Tensor,
    values: Tensor,
    q: Tensor,
    *,
    variant: AttentionVariant,
    kernel: Kernel,
) -> Tensor:
    """Attend over what the KV cache holds already, group by group: q [rows, heads, dim]."""
    if groups[0].rows is None:
        return kernel(groups[0], keys, values, q, variant)
    out = q.new_empty(q.shape[0], q.shape[1], values.shape[2])
    for group in groups:
        assert group.rows is not None
        rows = group.rows
        attended = kernel(group, keys, values, q.index_select(0, rows), variant)
        if group.valid is not None:
            rows = rows.index_select(0, group.valid)
            attended = attended.index_select(0, group.valid)
        out.index_copy_(0, rows, attended)
    return out
