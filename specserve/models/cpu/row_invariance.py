"""Checks that a row of a product has the same bits alone and beside others, before its use.

A kernel that fails at a linear layer's shape is replaced there; attention in float32 pads its rows.
Knows shapes, no weights.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from specserve.models.cpu.linear_kernels import LinearKernel, linear_kernel

log = logging.getLogger(__name__)

ALONE = 8
"""Rows that are computed alone."""
COMPANIES = (2, 7, 17, 48)
"""Rows of the passes in which these are found again."""
MAX_WEIGHTS = 1 << 18
"""Numbers of the weight that is tried: all inputs of a large layer, and some of its outputs."""
MAX_OUTPUTS = 256
BATCH = 3
"""Products of the batch that is tried for attention."""
ROW_STEPS = (1, 4, 8, 16)
"""Multiples to which the rows of such a product may be padded."""
MOST_ROWS = 48


class RowByRowKernel:
    """The products of another kernel one row at a time, which reads all weights for each row."""

    def __init__(self, kernel: LinearKernel) -> None:
        self.name = f"{kernel.name}, row by row"
        self._kernel = kernel

    def pack(self, weight: Tensor) -> Tensor:
        return self._kernel.pack(weight)

    def product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        out = x.new_empty(len(x), outputs)
        for row in range(len(x)):
            one = slice(row, row + 1)
            more = None if residual is None else residual[one]
            out[one] = self._kernel.product(x[one], packed, outputs, bias, more)
        return out

    def unrounded_product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None
    ) -> Tensor:
        out = x.new_empty(len(x), outputs, dtype=torch.float32)
        for row in range(len(x)):
            one = slice(row, row + 1)
            out[one] = self._kernel.unrounded_product(x[one], packed, outputs, bias)
        return out

    def interleave(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._kernel.interleave(gate, up)

    def gated_product(self, x: Tensor, packed: Tensor, outputs: int) -> Tensor:
        out = x.new_empty(len(x), outputs)
        for row in range(len(x)):
            one = slice(row, row + 1)
            out[one] = self._kernel.gated_product(x[one], packed, outputs)
        return out


@cache
def row_invariant_kernel(
    kernel: LinearKernel, inner: int, outer: int, dtype: torch.dtype = torch.bfloat16
) -> LinearKernel:
    """Return the kernel for weights [outer, inner]: the one given, or the next that keeps bits.

    A shape is tried once a process. The kernel given is returned, with a warning, if none does.
    """
    onednn = linear_kernel("onednn", dtype)
    for candidate in dict.fromkeys((kernel, onednn, RowByRowKernel(onednn))):
        if is_row_invariant(candidate, inner, outer, dtype):
            if candidate is not kernel:
                log.warning(
                    "linear layers from %d to %d run in %s: in %s the bits of a row depend on the "
                    "rows beside it on this processor",
                    *(inner, outer, candidate.name, kernel.name),
                )
            return candidate
    log.warning(
        "linear layers from %d to %d run in %s, whose bits change on this processor from pass to "
        "pass, as those of all kernels do: texts may depend on what else is served",
        *(inner, outer, kernel.name),
    )
    return kernel


@cache
def is_row_invariant(
    kernel: LinearKernel, inner: int, outer: int, dtype: torch.dtype = torch.bfloat16
) -> bool:
    """Return whether rows have the same bits alone and beside others, in all of its products.

    A kernel is tried once at each shape.
    """
    outer = min(outer, MAX_OUTPUTS, max(1, MAX_WEIGHTS // inner))
    x, weight = cancelling_products(max(COMPANIES), inner, outer, dtype=dtype)
    packed = kernel.pack(weight)
    gate = kernel.pack(kernel.interleave(weight, weight.flip(0)))
    residual = (x[:, :1] * 1e-6).expand(-1, outer).contiguous()  # as small as what sums leave

    bias = weight[:, 0] * 1e-6

    def run(start: int, stop: int) -> Tensor:  # [rows, 3 * outer]
        rows = x[start:stop]
        plain = kernel.product(rows, packed, outer, bias, residual[start:stop])
        unrounded = kernel.unrounded_product(rows, packed, outer, bias)
        return torch.cat([plain, unrounded, kernel.gated_product(rows, gate, outer)], dim=1)

    alone = torch.cat([run(row, row + 1) for row in range(ALONE)])
    for rows in COMPANIES:
        start = max(0, ALONE - rows)
        if not torch.equal(run(start, start + rows)[: ALONE - start], alone[start:]):
            return False
    return True


@cache
def float32_row_step(inner: int, outer: int) -> int:
    """Return to what multiple batched products in float32 pad their rows; 1 if that is no help.

    A shape is tried once a process. MKL adds up the products of up to three rows in another order,
    by trial on AMD, and may give each thread some of the rows.
    """
    for step in ROW_STEPS:
        if is_batch_invariant(step, inner, outer):
            return step
    log.warning(
        "attention in float32, from %d to %d: the bits of a row depend on the rows beside it on "
        "this processor; texts may depend on what else is served",
        *(inner, outer),
    )
    return 1


def is_batch_invariant(step: int, inner: int, outer: int) -> bool:
    """Return whether rows of batched products have the same bits in all multiples of `step`."""
    found = cancelling_products(MOST_ROWS, inner, outer, dtype=torch.float32)
    x, weight = (tensor.expand(BATCH, -1, -1).contiguous() for tensor in found)
    transposed = weight.transpose(1, 2)
    for factor in (transposed, transposed.contiguous()):  # keys, and values
        whole = torch.bmm(x, factor)
        for rows in range(step, MOST_ROWS, step):
            first = torch.bmm(x[:, :rows], factor)
            last = torch.bmm(x[:1, -rows:], factor[:1])
            if not (torch.equal(first, whole[:, :rows]) and torch.equal(last, whole[:1, -rows:])):
                return False
    return True


def cancelling_products(
    rows: int, inner: int, outer: int, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Return x [rows, inner] and weight [outer, inner] whose products cancel in pairs.

    The pairs are spread over the whole inner dimension. A sum leaves only its rounding, so that
    summing in another order shows.
    """
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(rows, inner, generator=generator)
        * torch.randint(-6, 6, (rows, inner), generator=generator).exp2()
    ).to(dtype)
    weight = torch.randn(outer, inner, generator=generator).to(dtype)
    order = torch.randperm(inner, generator=generator)
    one, other = order[: inner // 2 * 2].view(2, -1)
    x[:, order[2 * len(one) :]] = 0  # of an odd number the last
    x[:, other] = x[:, one]
    weight[:, other] = -weight[:, one]
    return x, weight
