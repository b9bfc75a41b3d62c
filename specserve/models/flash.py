"""FlashAttention, where it is installed: reads the pages where they lie, so nothing is gathered. CUDA only, not row-invariant."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from specserve.models.attention import Kernel, Rule, invariant
from specserve.models.layout import Group

PAGE_MULTIPLE = 256  # its paged kernels want pages of so many slots


def is_installed() -> bool:
    return find_spec("flash_attn") is not None


def flash(page_size: int) -> Kernel:
    from flash_attn import flash_attn_with_kvcache  # an optional dependency

    def kernel(group: Group, keys: Tensor, values: Tensor, q: Tensor, rule: Rule) -> Tensor:
        if rule.sinks is not None:
            return invariant(group, keys, values, q, rule)
        heads, kv_heads = q.shape[1], keys.shape[1]
        out = flash_attn_with_kvcache(
            q.view(group.seqs, group.queries, heads, -1),
            keys.view(-1, page_size, kv_heads, keys.shape[2]),
            values.view(-1, page_size, kv_heads, values.shape[2]),
            cache_seqlens=(group.positions[:, 0] + group.queries).to(
                torch.int32
            ),  # padding rows come last and are dropped later
            block_table=group.pages.device_table.to(torch.int32),
            softmax_scale=rule.scaling,
            causal=True,
            window_size=(-1, -1) if rule.window is None else (rule.window - 1, 0),
            softcap=rule.softcap or 0.0,
        )
        return out.reshape(group.seqs * group.queries, heads, -1)  # type: ignore[no-any-return]

    return kernel
