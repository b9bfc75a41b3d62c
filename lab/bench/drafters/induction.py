"""Induction heads, written into a Llama of three layers before it is trained.

They are what gradients take longest to find. Layer 0 writes the tokens before each position into
slots of its hidden state. Layer 1 adds, to each token that is to be replaced, its replacement.
Layer 2 looks for the position whose slots match the tokens just written, and copies its token.
All of it is rough, and training may change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EMBEDDING_DIMS = 64
"""Dimensions that embeddings start with nonzero values in; the others are for slots."""
EMBEDDING_STD = 0.17
SHARPNESS = 8.0
"""Biases of q and k: how sharply a head attends to one position."""
SLOT_GAIN = 0.1
"""Makes a slot's content about as long as the embedding beside it."""
EMBEDDING_SHARE = 0.57
"""The embedding's share of the whole hidden state at a position."""
COPY_GAIN, REPLACE_GAIN = 1.0, 0.35
"""Gains of values; what is copied outweighs the token that it follows."""
MATCH, CERTAIN_MATCH = 1.2, 2.0
"""Gains of q and k, where several matches add up and where one must suffice."""
FIRST_POSITION_BIAS = 0.5
"""Advantage of the first position over a single match, in matches.

It is attended to where nothing is to be replaced.
"""
SLOW = 0.006
"""Radians a position below which a rotary dimension hardly turns within a text."""


@torch.no_grad()
def add_induction_heads(model: Any, begin: int) -> None:
    """Write the heads into `model`, whose texts start with the token `begin`.

    The model must have attention biases, and a key head for every query head. The token two
    positions after `begin` is the replacement of the token before it.
    """
    embedding = model.get_input_embeddings().weight
    nn.init.normal_(embedding[:, :EMBEDDING_DIMS], std=EMBEDDING_STD)
    embedding[:, EMBEDDING_DIMS:] = 0
    first, second, third = (layer.self_attn for layer in model.model.layers)
    steps = model.model.rotary_emb.inv_freq  # [width / 2], radians a position
    dims = torch.cat([steps < SLOW] * 2).nonzero()[:, 0]
    start = EMBEDDING_SHARE * F.rms_norm(embedding[begin], embedding[begin].shape)
    code, *slots = _add_previous_token_heads(first, steps)
    _add_matching_heads(
        second, dims, (code,), slots[:1], value_gain=REPLACE_GAIN, match_gain=CERTAIN_MATCH
    )
    _add_constant_match(second, dims, code @ start, slots[1])
    _add_constant_match(second, dims, FIRST_POSITION_BIAS * code @ start, code)
    _zero_value_of(second, start)
    _add_matching_heads(
        third, dims, (code, *slots[:-1]), slots, value_gain=COPY_GAIN, match_gain=MATCH
    )


def _add_previous_token_heads(attention: Any, steps: Tensor) -> list[Tensor]:
    """Make each head write the code of the token one position further back, while slots last.

    Returns the projection of embeddings to codes, and the projections of hidden states to slots,
    nearest position first. How far back a head looks is the angle between two constant vectors, its
    biases of q and k.
    """
    width, hidden = attention.head_dim, attention.q_proj.in_features
    code = F.pad(_orthonormal(width, EMBEDDING_DIMS), (0, hidden - EMBEDDING_DIMS))
    slots = [
        torch.eye(hidden)[start : start + width] for start in range(EMBEDDING_DIMS, hidden, width)
    ]
    for back, (slot, rows) in enumerate(zip(slots, _head_rows(attention), strict=False), 1):
        angles = back * steps
        attention.q_proj.bias[rows] = SHARPNESS * torch.cat([angles.cos(), -angles.sin()])
        attention.k_proj.bias[rows] = SHARPNESS * torch.cat(
            [torch.ones_like(steps), torch.zeros_like(steps)]
        )
        attention.v_proj.weight[rows] = code
        attention.o_proj.weight[:, rows] = SLOT_GAIN * slot.T
    return [code, *slots]


def _add_matching_heads(
    attention: Any,
    dims: Tensor,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    *,
    value_gain: float,
    match_gain: float,
) -> None:
    """Match each of `queries` with its key; every head copies a part of the embedding it finds."""
    width, hidden = attention.head_dim, attention.q_proj.in_features
    basis = F.pad(_orthonormal(EMBEDDING_DIMS, EMBEDDING_DIMS), (0, hidden - EMBEDDING_DIMS))
    for rows in _head_rows(attention):
        part = basis[rows % EMBEDDING_DIMS]
        for query, key in zip(queries, keys, strict=True):
            mixed = match_gain * _orthonormal(width, width)[: len(dims)]
            attention.q_proj.weight[rows[dims]] += mixed @ query
            attention.k_proj.weight[rows[dims]] += mixed @ key
        attention.v_proj.weight[rows] = part
        attention.o_proj.weight[:, rows] = value_gain * EMBEDDING_DIMS / hidden * part.T


def _add_constant_match(attention: Any, dims: Tensor, query: Tensor, key: Tensor) -> None:
    """Match `query` with `key` from every position, whichever token stands there."""
    for rows in _head_rows(attention):
        mixed = CERTAIN_MATCH * _orthonormal(attention.head_dim, attention.head_dim)[: len(dims)]
        attention.q_proj.bias[rows[dims]] += mixed @ query
        attention.k_proj.weight[rows[dims]] += mixed @ key


def _zero_value_of(attention: Any, state: Tensor) -> None:
    """Make attention to `state` copy nothing."""
    attention.v_proj.weight -= torch.outer(attention.v_proj.weight @ state, state) / state.dot(
        state
    )


def _head_rows(attention: Any) -> Iterator[Tensor]:
    """Yield the rows of each head in the projections."""
    for start in range(0, attention.q_proj.out_features, attention.head_dim):
        yield torch.arange(start, start + attention.head_dim)


def _orthonormal(rows: int, columns: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(rows, columns))
