"""Triton kernels for what lies between the products of a layer, on GPUs.

They round where torch's operations round. Triton comes with torch's builds for CUDA.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,attr-defined,untyped-decorator"
# Triton infers the types of its kernels.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_BLOCK = 1024


@triton.jit
def rotate_and_write_kernel(
    qk,
    v,
    table,
    positions,
    slots,
    q_out,
    keys,
    values,
    qk_stride,
    v_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    lanes = tl.arange(0, block)
    is_lane = lanes < dim
    slot = tl.load(slots + row)
    if head < heads + kv_heads:
        own = qk + row * qk_stride + head * dim
        angles = table + tl.load(positions + row) * (2 * dim)
        x = tl.load(own + lanes, is_lane, 0.0)
        turned = tl.load(own + (lanes + dim // 2) % dim, is_lane, 0.0).to(tl.float32)
        cosine = tl.load(angles + lanes, is_lane, 0.0).to(tl.float32)
        sine = tl.load(angles + dim + lanes, is_lane, 0.0).to(tl.float32)
        product = (x.to(tl.float32) * cosine).to(x.dtype).to(tl.float32)
        rotated = (product + turned * sine).to(x.dtype)
        if head < heads:
            tl.store(q_out + (row * heads + head) * dim + lanes, rotated, is_lane)
        else:
            tl.store(keys + (slot * kv_heads + head - heads) * dim + lanes, rotated, is_lane)
    else:
        part = head - heads - kv_heads
        x = tl.load(v + row * v_stride + part * dim + lanes, is_lane, 0.0)
        tl.store(values + (slot * kv_heads + part) * dim + lanes, x, is_lane)


@triton.jit
def gate_kernel(both, out, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * block + tl.arange(0, block)
    is_lane = lanes < width
    gate = tl.load(both + 2 * row * width + lanes, is_lane, 0.0)
    up = tl.load(both + (2 * row + 1) * width + lanes, is_lane, 0.0).to(tl.float32)
    x = gate.to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + lanes, (silu * up).to(gate.dtype), is_lane)


@triton.jit
def rms_norm_kernel(x, weight, out, stride, eps, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, block)
    is_lane = lanes < width
    own = tl.load(x + row * stride + lanes, is_lane, 0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(own * own, 0) / width + eps)
    weights = tl.load(weight + lanes, is_lane, 0.0).to(tl.float32)
    tl.store(out + row * width + lanes, (own * scale * weights).to(out.dtype.element_ty), is_lane)


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Rotate q and k, write k and v into the pools of a layer, and return q.

    q [rows, heads, dim] and k [rows, kv_heads, dim] lie beside one another in every row; the pools
    [slots, kv_heads, dim] are contiguous. `table` is that of a `Rotation`.
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    assert k.storage_offset() == q.storage_offset() + heads * dim
    assert k.stride(0) == q.stride(0)
    out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    with torch.cuda.device(q.device):  # kernels go to the current one
        rotate_and_write_kernel[(rows, heads + 2 * kv_heads)](
            q,
            v,
            table,
            positions,
            slots,
            out,
            keys,
            values,
            q.stride(0),
            v.stride(0),
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            block=triton.next_power_of_2(dim),
            num_warps=1,
        )
    return out


def gated(both: Tensor) -> Tensor:
    """Return silu(gate) * up, the two halves of contiguous rows [rows, 2 * width]."""
    rows, width = both.shape[0], both.shape[1] // 2
    out = torch.empty((rows, width), dtype=both.dtype, device=both.device)
    with torch.cuda.device(both.device):
        gate_kernel[(rows, triton.cdiv(width, GATE_BLOCK))](
            both, out, width=width, block=GATE_BLOCK
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight of rows [rows, width], each of them contiguous."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    with torch.cuda.device(x.device):
        rms_norm_kernel[(rows,)](
            x,
            weight,
            out,
            x.stride(0),
            eps,
            width=width,
            block=block,
            num_warps=min(16, max(1, block // 512)),
        )
    return out
