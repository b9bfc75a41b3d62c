"""Attention of packed sequences over paged keys and values. Knows rows and slots; no model, no cache policy.

Row-invariant on CPU in bf16: a row's result is the same bits whatever shares its pass (docs/architecture.md says what that takes),
which `scaled_dot_product_attention` does not give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.models.layout import Group, Layout


@dataclass(frozen=True, slots=True)
class Rule:
    """What an architecture adds to plain causal attention."""

    scaling: float
    window: int | None = None  # keys seen, the query's own included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads] a logit that takes probability and gives no value


class Kernel(Protocol):
    """Attends one group: q [seqs * queries, heads, dim] over the pools [slots, kv_heads, dim]; answers the shape of q."""

    def __call__(
        self, group: Group, keys: Tensor, values: Tensor, q: Tensor, rule: Rule
    ) -> Tensor: ...


def attend(
    layout: Layout,
    keys: Tensor,
    values: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rule: Rule,
    kernel: Kernel,
) -> Tensor:
    """Write k and v [rows, kv_heads, dim] of this pass into the pools, then attend, company by company. Answers [rows, heads, dim]."""
    keys.index_copy_(0, layout.slots, k)
    values.index_copy_(0, layout.slots, v)
    return look(layout.groups, keys, values, q, rule=rule, kernel=kernel)


def look(
    groups: Sequence[Group], keys: Tensor, values: Tensor, q: Tensor, *, rule: Rule, kernel: Kernel
) -> Tensor:
    """Attend over what the pools hold already, company by company: q [rows, heads, dim]."""
    if groups[0].rows is None:
        return kernel(groups[0], keys, values, q, rule)
    out = q.new_empty(q.shape[0], q.shape[1], values.shape[2])
    for group in groups:
        assert group.rows is not None
        rows = group.rows
        mine = kernel(group, keys, values, q.index_select(0, rows), rule)
        if group.valid is not None:
            rows, mine = rows.index_select(0, group.valid), mine.index_select(0, group.valid)
        out.index_copy_(0, rows, mine)
    return out


def invariant(group: Group, keys: Tensor, values: Tensor, q: Tensor, rule: Rule) -> Tensor:
    """Two batched products with an fp32 softmax between them, the second in blocks of keys that are added up in order.

    A product's bits depend on the length that it sums over, hence the blocks; on nothing else, once it is oneDNN's.
    """
    kv_heads, heads = keys.shape[1], q.shape[1]
    shared = heads // kv_heads  # query heads that share a key head
    n, t, c = group.seqs, group.queries, group.context
    k, v = _gathered(group, keys), _gathered(group, values)
    scores = torch.bmm(_by_head(q, n, t, kv_heads), k.transpose(1, 2)).view(
        n, kv_heads, t, shared, c
    )
    scores = _biased(scores, group.bias(rule.window), rule).view(n * kv_heads, t * shared, c)
    weights = (
        _with_sinks(scores, rule.sinks, kv_heads, t)
        if rule.sinks is not None
        else scores.softmax(-1)
    )
    out = _weighted(weights.to(v.dtype), v, block=group.block)  # [n * kv_heads, t * shared, dim]
    if t == 1:
        return out.reshape(n, heads, -1)
    return out.view(n, kv_heads, t, shared, -1).transpose(1, 2).reshape(n * t, heads, -1)


def _by_head(q: Tensor, seqs: int, queries: int, kv_heads: int) -> Tensor:
    """[seqs * queries, heads, dim] -> [seqs * kv_heads, queries * (heads that share a key head), dim]; single queries lie so already."""
    if queries == 1:
        return q.reshape(seqs * kv_heads, -1, q.shape[2])
    return (
        q.view(seqs, queries, kv_heads, -1, q.shape[2])
        .transpose(1, 2)
        .reshape(seqs * kv_heads, -1, q.shape[2])
    )


def _biased(
    scores: Tensor, bias: Tensor, rule: Rule
) -> Tensor:  # both [seqs, kv_heads or 1, queries, shared or 1, context]
    """The scores as the architecture wants them, in fp32, with those of the keys out of sight at -inf."""
    if rule.softcap is None:
        return torch.add(bias, scores, alpha=rule.scaling)
    return scores.float().mul_(rule.scaling / rule.softcap).tanh_().mul_(rule.softcap).add_(bias)


def _weighted(weights: Tensor, values: Tensor, *, block: int) -> Tensor:
    """weights @ values, [n, rows, keys] @ [n, keys, dim], block by block; padding blocks add zeros and change no bit."""
    n, rows, keys = weights.shape
    if keys == block:
        return torch.bmm(weights, values)
    blocks = weights.view(n, rows, -1, block).transpose(1, 2).reshape(-1, rows, block)
    parts = torch.bmm(blocks, values.view(-1, block, values.shape[2])).view(
        n, -1, rows, values.shape[2]
    )
    return parts.cumsum(1, dtype=torch.float32)[:, -1].to(
        values.dtype
    )  # a running sum adds in order, which `sum` does not promise


def sdpa(group: Group, keys: Tensor, values: Tensor, q: Tensor, rule: Rule) -> Tensor:
    """The library's fused kernel, for CUDA without FlashAttention: fast on long prompts, not row-invariant."""
    if rule.softcap is not None or rule.sinks is not None:
        return invariant(group, keys, values, q, rule)
    n, t, kv_heads, heads = group.seqs, group.queries, keys.shape[1], q.shape[1]
    k, v = (_gathered(group, pool).view(n, kv_heads, group.context, -1) for pool in (keys, values))
    seen = group.bias(rule.window)[:, :, :, 0] == 0  # [n, 1, t, context]
    q = q.view(n, t, heads, -1).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=rule.scaling, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(n * t, heads, -1)


def _gathered(group: Group, pool: Tensor) -> Tensor:  # [seqs * kv_heads, context, dim]
    return (
        pool.view(-1, pool.shape[2])
        .index_select(0, group.pages.gather)
        .view(group.seqs * pool.shape[1], group.context, -1)
    )


def _with_sinks(scores: Tensor, sinks: Tensor, kv_heads: int, queries: int) -> Tensor:
    sink = (
        sinks.float().view(kv_heads, 1, -1).expand(-1, queries, -1).reshape(kv_heads, -1)
    )  # [kv_heads, queries * shared]
    sink = sink.repeat(scores.shape[0] // kv_heads, 1).unsqueeze(-1)
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
