"""Attention kernels of torch's own products, over keys and values gathered from the KV cache.

On CPU in bf16 and float32 `invariant_kernel` is row-invariant: a row's result has the same bits
whatever shares its pass (docs/design/exactness.md says what that takes).
`scaled_dot_product_attention` does not give that.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.models.attention import AttentionVariant
from specserve.models.cpu.row_invariance import float32_row_step
from specserve.models.float8_pages import STORED_AS
from specserve.models.float8_weight import FLOAT8
from specserve.models.layout import AttentionGroup
from specserve.models.shape_buckets import BATCH_PIECES, QUERY_PIECES, pieces

MAX_SCORES = 2**25
"""Scores of one product on a CPU, so that long contexts take no more memory than this times ten."""


def invariant_kernel(
    group: AttentionGroup, keys: Tensor, values: Tensor, q: Tensor, variant: AttentionVariant
) -> Tensor:
    """Compute two batched products with an fp32 softmax between them.

    The second product sums over blocks of keys, which are added up in order. A product's bits
    depend on the length that it sums over, and on nothing else once oneDNN computes it. So its
    shape may be any: queries and batches are cut into pieces of few sizes, and of MAX_SCORES.
    """
    n, t, heads = group.seqs, group.queries, q.shape[1]
    k, v = _gather(group, keys, q.dtype), _gather(group, values, q.dtype)
    bias = group.bias(variant.window)
    q = q.view(n, t, heads, -1)
    most = max(1, MAX_SCORES // (n * heads * group.context))
    sizes = tuple(size for size in QUERY_PIECES if size <= most)
    parts = pieces(t, sizes) if q.is_cpu else ()
    if len(parts) < 2:
        return _attend_queries(group, k, v, q, bias, variant).flatten(0, 1)
    attended = [
        _attend_queries(group, k, v, q[:, start:stop], bias[:, :, start:stop], variant)
        for start, stop in parts
    ]
    return torch.cat(attended, dim=1).flatten(0, 1)


def _attend_queries(
    group: AttentionGroup,
    k: Tensor,  # [seqs * kv_heads, context, dim], and v
    v: Tensor,
    q: Tensor,  # [seqs, queries, heads, dim]
    bias: Tensor,  # [seqs, kv_heads or 1, queries, 1, context]
    variant: AttentionVariant,
) -> Tensor:  # [seqs, queries, heads, dim]
    n, t, heads, _ = q.shape
    kv_heads, c = len(k) // n, group.context
    shared = heads // kv_heads  # query heads that share a key head
    scores = _dot(_by_head(q, kv_heads), k, kv_heads, block=group.key_block).view(
        n, kv_heads, t, shared, c
    )
    scores = _scale_and_mask(scores, bias, variant).view(n * kv_heads, t * shared, c)
    weights = (
        _softmax_with_sinks(scores, variant.sinks, kv_heads, t)
        if variant.sinks is not None
        else scores.softmax(-1)
    )
    out = _weighted_sum(
        weights.to(v.dtype), v, kv_heads, block=group.key_block
    )  # [n * kv_heads, t * shared, dim]
    if t == 1:
        return out.reshape(n, 1, heads, -1)
    return out.view(n, kv_heads, t, shared, -1).transpose(1, 2).reshape(n, t, heads, -1)


def _by_head(q: Tensor, kv_heads: int) -> Tensor:
    """Return q [seqs, queries, heads, dim] as [seqs * kv_heads, queries * shared, dim].

    `shared` is the number of query heads that share a key head. Single queries are in this order
    already.
    """
    seqs, queries, _, dim = q.shape
    if queries == 1:
        return q.reshape(seqs * kv_heads, -1, dim)
    return (
        q.reshape(seqs, queries, kv_heads, -1, dim)
        .transpose(1, 2)
        .reshape(seqs * kv_heads, -1, dim)
    )


def _scale_and_mask(scores: Tensor, bias: Tensor, variant: AttentionVariant) -> Tensor:
    """Return scaled scores in fp32, -inf for hidden keys.

    Both tensors are [seqs, kv_heads or 1, queries, shared or 1, context].
    """
    if variant.softcap is None:
        return torch.add(bias, scores, alpha=variant.scaling)
    return (
        scores.float()
        .mul_(variant.scaling / variant.softcap)
        .tanh_()
        .mul_(variant.softcap)
        .add_(bias)
    )


def _dot(q: Tensor, k: Tensor, unit: int, *, block: int) -> Tensor:
    """Return the product of q [n, rows, dim] with each of k [n, keys, dim]: [n, rows, keys].

    Each block of keys is a product of its own.
    """
    n, rows, dim = q.shape
    num_blocks = k.shape[1] // block
    if num_blocks == 1:
        return _product(q, k.transpose(1, 2), unit)
    q = q.unsqueeze(1).expand(n, num_blocks, rows, dim).reshape(-1, rows, dim)
    parts = _product(q, k.view(-1, block, dim).transpose(1, 2), unit)
    return parts.view(n, num_blocks, rows, block).transpose(1, 2).reshape(n, rows, -1)


def _product(a: Tensor, b: Tensor, unit: int) -> Tensor:
    """Return a @ b for batches of matrices, in pieces of few sizes times `unit`."""
    rows = a.shape[1]
    is_float32 = a.is_cpu and a.dtype == torch.float32
    step = float32_row_step(a.shape[2], b.shape[2]) if is_float32 else 1
    if missing := -rows % step:
        return _product(F.pad(a, (0, 0, 0, missing)), b, unit)[:, :rows].contiguous()
    parts = pieces(len(a) // unit, BATCH_PIECES) if a.is_cpu else ()
    if len(parts) < 2:
        return torch.bmm(a, b)
    out = a.new_empty(len(a), a.shape[1], b.shape[2])
    for start, stop in parts:
        piece = slice(start * unit, stop * unit)
        torch.bmm(a[piece], b[piece], out=out[piece])
    return out


def _weighted_sum(weights: Tensor, values: Tensor, unit: int, *, block: int) -> Tensor:
    """Return the product [n, rows, keys] @ [n, keys, dim], summed block by block.

    Padding blocks add zeros and change no bit.
    """
    n, rows, keys = weights.shape
    if keys == block:
        return _product(weights, values, unit)
    blocks = weights.view(n, rows, -1, block).transpose(1, 2).reshape(-1, rows, block)
    parts = _product(blocks, values.view(-1, block, values.shape[2]), unit).view(
        n, -1, rows, values.shape[2]
    )
    # A running sum adds in order, which `sum` does not promise.
    return parts.cumsum(1, dtype=torch.float32)[:, -1].to(values.dtype)


def sdpa_kernel(
    group: AttentionGroup, keys: Tensor, values: Tensor, q: Tensor, variant: AttentionVariant
) -> Tensor:
    """Attend with torch's fused kernel, for CUDA without FlashInfer.

    Fast on long prompts, not row-invariant.
    """
    if variant.softcap is not None or variant.sinks is not None:
        return invariant_kernel(group, keys, values, q, variant)
    n, t, kv_heads, heads = group.seqs, group.queries, keys.shape[1], q.shape[1]
    k, v = (
        _gather(group, pool, q.dtype).view(n, kv_heads, group.context, -1)
        for pool in (keys, values)
    )
    seen = group.bias(variant.window)[:, :, :, 0] == 0  # [n, 1, t, context]
    q = q.view(n, t, heads, -1).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=variant.scaling, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(n * t, heads, -1)


def _gather(
    group: AttentionGroup, pool: Tensor, dtype: torch.dtype
) -> Tensor:  # [seqs * kv_heads, context, dim]
    """Return the keys or values of a group; FP8 pages' are widened, and not yet scaled."""
    shape = group.seqs * pool.shape[1], group.context, pool.shape[2]
    if pool.dtype != FLOAT8:
        return pool.view(-1, pool.shape[2]).index_select(0, group.pages.gather).view(shape)
    stored = pool.view(STORED_AS).view(-1, pool.shape[2])
    return stored.index_select(0, group.pages.gather).view(FLOAT8).view(shape).to(dtype)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor, kv_heads: int, queries: int) -> Tensor:
    sink = (
        sinks.float().view(kv_heads, 1, -1).expand(-1, queries, -1).reshape(kv_heads, -1)
    )  # [kv_heads, queries * shared]
    sink = sink.repeat(scores.shape[0] // kv_heads, 1).unsqueeze(-1)
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
