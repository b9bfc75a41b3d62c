"""Attention of Falcon, whose library code computes it itself. Knows no cache and no pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Attend = Callable[..., tuple[Tensor, Any]]


def attend_by(module: Any, attend: Attend) -> None:
    """Make the layers of a Falcon attend by a function with the library's interface."""
    for layer in module.transformer.h:
        layer.self_attention.forward = _Forward(layer.self_attention, attend)
    # No implementation of the library, so that it builds no mask of all rows by all rows.
    module.config._attn_implementation = "specserve"


class _Forward:
    """The forward pass of one attention module: heads apart, rotated, attended, joined."""

    def __init__(self, own: Any, attend: Attend) -> None:
        self._own, self._attend = own, attend

    def __call__(
        self, hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: object
    ) -> tuple[Tensor, None]:
        query, key, value = self._heads(self._own.query_key_value(hidden))
        cos, sin = (angles.unsqueeze(1) for angles in position_embeddings)
        attended, _weights = self._attend(
            self._own, _rotate(query, cos, sin), _rotate(key, cos, sin), value, None
        )
        return self._own.dense(attended.flatten(2)), None

    def _heads(self, qkv: Tensor) -> tuple[Tensor, ...]:  # each [1, heads, rows, dim]
        """Return queries, keys and values.

        Each key and value head comes after the query heads that share it.
        """
        own = self._own
        shared = own.num_heads // own.num_kv_heads
        groups = qkv.view(*qkv.shape[:2], own.num_kv_heads, shared + 2, own.head_dim)
        parts = groups[..., :-2, :], groups[..., -2:-1, :], groups[..., -1:, :]
        return tuple(part.flatten(2, 3).transpose(1, 2) for part in parts)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
