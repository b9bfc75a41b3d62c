"""Attention of packed sequences over paged keys and values. Knows rows, slots and positions; no model, no cache policy.

Row-invariant on CPU in bf16: a row's result is the same bits whatever shares its pass (docs/architecture.md says what that takes),
which `scaled_dot_product_attention` does not give.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

DIRECT = 4096  # up to so many multiplications torch's own loops take a bf16 product over from oneDNN, and sum in another order
FEW_QUERIES = 32  # up to here sequences are batched together; longer runs (prompts) attend one sequence at a time


@dataclass(frozen=True, slots=True)
class Rule:
    """What an architecture adds to plain causal attention."""

    scaling: float
    window: int | None = None  # keys seen, the query's own included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads] a logit that takes probability and gives no value


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that attend in one batched product: each has `queries` rows and `context` keys, padded at the end."""

    rows: Tensor | None  # [seqs * queries] the pass's row at each place, padding repeats a row; None: all rows in order
    valid: Tensor | None  # [n] the places that are no padding; None: all
    gather: Tensor  # [seqs * kv_heads * context] into the pool seen as [slots * kv_heads, dim]
    pages: Tensor  # [seqs, pages] the same, for kernels that read pages where they lie
    positions: Tensor  # [seqs, queries]
    seqs: int
    queries: int
    context: int  # a multiple of the block
    block: int  # keys that one product sums over
    rounded: bool = False  # padded up to a shape that recurs
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by window; layers share them within a pass

    def mask(self, window: int | None) -> Tensor:  # [seqs, 1, queries, 1, context], True where a key is out of sight
        if window not in self.masks:
            keys = torch.arange(self.context, device=self.positions.device)
            distance = self.positions[:, :, None] - keys  # [seqs, queries, context]
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            self.masks[window] = hidden[:, None, :, None, :]
        return self.masks[window]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the rows of one pass stand: their positions, the slots that they write, and who attends with whom."""

    positions: Tensor  # [rows]
    slots: Tensor  # [rows]
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Writes:
    """What a pass writes: `counts[i]` tokens at `starts[i]`, into the pages of `table[i]`."""

    starts: NDArray[np.int64]  # [seqs]
    counts: NDArray[np.int64]  # [seqs]
    table: NDArray[np.int64]  # [seqs, pages]
    context: int | None = None  # round every context up to this length, for shapes that recur

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.starts + self.counts


def lay_out(writes: Writes, *, page_size: int, kv_heads: int, block: int, device: torch.device) -> Layout:
    starts, counts, table = writes.starts, writes.counts, writes.table
    rows, seqs = int(counts.sum()), len(counts)
    owner = np.repeat(np.arange(seqs), counts)  # [rows]
    firsts = np.cumsum(counts) - counts
    positions = np.arange(rows) + np.repeat(starts - firsts, counts)
    slots = table[owner, positions // page_size] * page_size + positions % page_size
    groups = tuple(
        _group(members, writes, firsts, positions, page_size=page_size, kv_heads=kv_heads, block=block, device=device)
        for members in ([np.arange(seqs)] if writes.context is not None else _companies(writes.lengths, counts))
    )
    return Layout(torch.from_numpy(positions).to(device), torch.from_numpy(slots).to(device), groups)


def _companies(lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Who attends together: short runs whose contexts are within a factor of two, so that padding never doubles the work."""
    if len(counts) == 1:
        return [np.zeros(1, dtype=np.int64)]
    size = np.maximum(np.ceil(np.log2(np.maximum(lengths, 1))), 8).astype(np.int64)
    key = np.where(counts <= FEW_QUERIES, size, -1 - np.arange(len(counts)))
    return [np.flatnonzero(key == k) for k in np.unique(key)]


def _group(
    members: NDArray[np.int64],
    writes: Writes,
    firsts: NDArray[np.int64],
    positions: NDArray[np.int64],
    *,
    page_size: int,
    kv_heads: int,
    block: int,
    device: torch.device,
) -> Group:
    own, lengths = writes.counts[members], writes.lengths[members]
    seqs, queries = len(members), int(own.max())
    context = writes.context or -(-int(lengths.max()) // block) * block
    pages = writes.table[members, : -(-context // page_size)]
    keys = (pages[:, :, None] * page_size + np.arange(page_size)).reshape(seqs, -1)[:, :context]  # [seqs, context]
    keys = np.pad(keys, ((0, 0), (0, context - keys.shape[1])))  # any slot will do, no query sees it
    gather = (keys[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]).reshape(-1)
    places = np.minimum(np.arange(queries), own[:, None] - 1) + firsts[members][:, None]  # [seqs, queries], padding repeats the last
    ragged = bool((own != queries).any())
    everything = not ragged and seqs == len(writes.counts)
    return Group(
        rows=None if everything else torch.from_numpy(places.reshape(-1)).to(device),
        valid=torch.from_numpy(np.flatnonzero((np.arange(queries) < own[:, None]).reshape(-1))).to(device) if ragged else None,
        gather=torch.from_numpy(gather).to(device),
        pages=torch.from_numpy(np.ascontiguousarray(pages)).to(device),
        positions=torch.from_numpy(positions[places]).to(device),
        seqs=seqs,
        queries=queries,
        context=context,
        block=block,
        rounded=writes.context is not None,
    )


class Kernel(Protocol):
    """Attends one group: q [seqs * queries, heads, dim] over the pools [slots, kv_heads, dim]; answers the shape of q."""

    def __call__(self, group: Group, keys: Tensor, values: Tensor, q: Tensor, rule: Rule) -> Tensor: ...


def attend(layout: Layout, keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor, *, rule: Rule, kernel: Kernel) -> Tensor:
    """Write k and v [rows, kv_heads, dim] of this pass into the pools, then attend, company by company. Answers [rows, heads, dim]."""
    keys.index_copy_(0, layout.slots, k)
    values.index_copy_(0, layout.slots, v)
    if layout.groups[0].rows is None:
        return kernel(layout.groups[0], keys, values, q, rule)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    for group in layout.groups:
        assert group.rows is not None
        rows = group.rows
        mine = kernel(group, keys, values, q.index_select(0, rows), rule)
        if group.valid is not None:
            rows, mine = rows.index_select(0, group.valid), mine.index_select(0, group.valid)
        out.index_copy_(0, rows, mine)
    return out


def key_block(head_dim: int) -> int:
    """How many keys one product sums over. Always the same number, and enough that a single query's product is oneDNN's."""
    block = 128
    while block * head_dim <= DIRECT:
        block *= 2
    return block


def invariant(group: Group, keys: Tensor, values: Tensor, q: Tensor, rule: Rule) -> Tensor:
    """Two batched products with an fp32 softmax between them, the second in blocks of keys that are added up in order.

    A product's bits depend on the length that it sums over, hence the blocks; on nothing else, once it is oneDNN's.
    """
    kv_heads, heads = keys.shape[1], q.shape[1]
    shared = heads // kv_heads  # query heads that share a key head
    n, t, c = group.seqs, group.queries, group.context
    k, v = _gathered(group, keys), _gathered(group, values)
    q = q.view(n, t, kv_heads, shared, -1).transpose(1, 2).reshape(n * kv_heads, t * shared, -1)
    scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(rule.scaling)  # [n * kv_heads, t * shared, c]
    if rule.softcap is not None:
        scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    scores.view(n, kv_heads, t, shared, c).masked_fill_(group.mask(rule.window), float("-inf"))
    weights = _with_sinks(scores, rule.sinks, kv_heads, t) if rule.sinks is not None else scores.softmax(-1)
    out = _weighted(weights.to(v.dtype), v, block=group.block)  # [n * kv_heads, t * shared, dim]
    return out.view(n, kv_heads, t, shared, -1).transpose(1, 2).reshape(n * t, heads, -1)


def _weighted(weights: Tensor, values: Tensor, *, block: int) -> Tensor:
    """weights @ values, [n, rows, keys] @ [n, keys, dim], block by block; padding blocks add zeros and change no bit."""
    n, rows, keys = weights.shape
    if keys == block:
        return torch.bmm(weights, values)
    blocks = weights.view(n, rows, -1, block).transpose(1, 2).reshape(-1, rows, block)
    parts = torch.bmm(blocks, values.view(-1, block, values.shape[2])).view(n, -1, rows, values.shape[2])
    return parts.cumsum(1, dtype=torch.float32)[:, -1].to(values.dtype)  # a running sum adds in order, which `sum` does not promise


def sdpa(group: Group, keys: Tensor, values: Tensor, q: Tensor, rule: Rule) -> Tensor:
    """The library's fused kernel, for CUDA without FlashAttention: fast on long prompts, not row-invariant."""
    if rule.softcap is not None or rule.sinks is not None:
        return invariant(group, keys, values, q, rule)
    n, t, kv_heads, heads = group.seqs, group.queries, keys.shape[1], q.shape[1]
    k, v = (_gathered(group, pool).view(n, kv_heads, group.context, -1) for pool in (keys, values))
    seen = ~group.mask(rule.window)[:, :, :, 0]  # [n, 1, t, context]
    q = q.view(n, t, heads, -1).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=rule.scaling, enable_gqa=True)
    return out.transpose(1, 2).reshape(n * t, heads, -1)


def _gathered(group: Group, pool: Tensor) -> Tensor:  # [seqs * kv_heads, context, dim]
    return pool.view(-1, pool.shape[2]).index_select(0, group.gather).view(group.seqs * pool.shape[1], group.context, -1)


def _with_sinks(scores: Tensor, sinks: Tensor, kv_heads: int, queries: int) -> Tensor:
    sink = sinks.float().view(kv_heads, 1, -1).expand(-1, queries, -1).reshape(kv_heads, -1)  # [kv_heads, queries * shared]
    sink = sink.repeat(scores.shape[0] // kv_heads, 1).unsqueeze(-1)
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
