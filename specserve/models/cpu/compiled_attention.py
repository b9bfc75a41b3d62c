"""Attention of runs of rows by compiled code, which reads the pages of the KV cache in place.

Row-invariant, like `attention.invariant_kernel`, whose numbers it computes in fewer roundings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve.machine_code.compiler import Function
from specserve.models.attention import AttentionVariant, Rotation
from specserve.models.cpu.compiled.attention import MAX_DIM, MAX_SHARED, NO_WINDOW, rows_of_a_run
from specserve.models.layout import Layout, Runs


class CompiledAttention:
    """The function `attention` of the compiled code."""

    rotates = True

    def __init__(self, function: Function, *, shared: int, page_size: int) -> None:
        self._function, self.page_size = function, page_size
        self.run_rows = rows_of_a_run(shared)

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
        """Write k and v of this pass, rotated, into the KV cache, then attend."""
        assert layout.runs is not None
        assert layout.slots.is_contiguous()
        runs, block_table = layout.runs.runs, layout.runs.block_table
        q, k, v = (_with_whole_rows(x) for x in (q, k, v))
        _, heads, dim = q.shape
        kv_heads, v_dim = v.shape[1:]
        out = q.new_empty(len(q), heads, v_dim)
        sinks = None if variant.sinks is None else variant.sinks.float().contiguous()
        self._function(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            layout.slots.data_ptr(),
            out.data_ptr(),
            runs.data_ptr(),
            block_table.data_ptr(),
            0 if rotation is None else rotation.table.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            len(runs),
            block_table.shape[1],
            self.page_size,
            2 * q.stride(0),
            2 * k.stride(0),
            2 * v.stride(0),
            2 * heads * v_dim,
            kv_heads,
            heads // kv_heads,
            dim,
            v_dim,
            variant.window or NO_WINDOW,
            variant.scaling,
            variant.softcap or 0.0,
            1 if len(runs) * kv_heads == 1 else torch.get_num_threads(),
        )
        return out


def _with_whole_rows(x: Tensor) -> Tensor:  # [rows, heads, dim]
    """Return the tensor with the heads of each row in order; rows may lie apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def fits(dim: int, v_dim: int, *, shared: int) -> bool:
    """Return whether heads are such as the compiled code takes; `shared` have the same keys."""
    return dim % 2 == 0 and max(dim, v_dim) <= MAX_DIM and shared <= MAX_SHARED


def check_attention(function: Function) -> None:
    """Raise ValueError for wrong numbers, or for rows that depend on one another."""
    generator = torch.Generator().manual_seed(0)
    keys, values, q = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((80, 1, 32), (80, 1, 32), (3, 2, 32))
    )
    attention = CompiledAttention(function, shared=2, page_size=16)

    def attend(first: int, count: int) -> Tensor:
        """Attend with queries at positions from 70 + first on."""
        rows, slots = slice(first, first + count), torch.arange(70 + first, 70 + first + count)
        runs = Runs(torch.tensor([[0, count, 70 + first, 0]]), torch.arange(5)[None])
        layout = Layout(slots, slots, (), runs=runs)
        k, v = keys[slots], values[slots]
        return attention.attend(layout, keys, values, q[rows], k, v, AttentionVariant(0.25))

    found = attend(0, 3)
    scores = torch.einsum("qhd,kd->qhk", q.double(), keys[:73, 0].double()) / 4
    hidden = torch.arange(73) > 70 + torch.arange(3)[:, None]
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
    expected = weights @ values[:73, 0].double()
    if (found.double() - expected).abs().max() > 2**-7 * expected.abs().max():
        raise ValueError("its attention is wrong")
    if not torch.equal(attend(1, 1), found[1:2]):
        raise ValueError("its attention depends on what shares a pass")
