"""Induction heads, written into a Llama of three layers before it learns: what gradients take longest to find.

Layer 0 notes in every place which tokens stood just before. Layer 1 looks for the place whose notes are what has just been written, and copies what
stands there. Layer 2 looks for the place behind which that token was replaced. All of it is rough, and free to change in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

SPREAD = 0.12  # of embeddings, which are the vocabulary head as well: so far apart that what is copied is the likeliest token
KEEN = 8.0  # biases of q and k: how surely a head looks to one place
NOTED = 0.18  # gain: a note is about as long as the embedding that it lies beside
COPIED, REPLACED = 1.0, 0.5  # likewise; what is copied outweighs the token that it comes behind
MATCH = 1.5  # gain of q and k
SLOW = 0.006  # radians a place: rotary dimensions that have hardly turned within a text


@torch.no_grad()
def induce(model: Any, begin: int) -> None:
    """With biases in its attention, and a key for every query head. Two places behind the token `begin` is what replaces the one before it."""
    embedding = model.get_input_embeddings().weight
    nn.init.normal_(embedding, std=SPREAD)
    first, second, third = (layer.self_attn for layer in model.model.layers)
    steps = model.model.rotary_emb.inv_freq  # [width / 2], radians a place
    dims = torch.cat([steps < SLOW] * 2).nonzero()[:, 0]
    code, *notes = _look_back(first, steps)
    _look_up(second, dims, (code, *notes[:-1]), notes, gain=COPIED)
    _look_up(third, dims, (code,), notes[:1], gain=REPLACED)
    _expect(third, dims, code @ embedding[begin] / SPREAD, notes[1])


def _look_back(attention: Any, steps: Tensor) -> list[Tensor]:
    """Each head a place further. What tokens are noted as, and where the notes lie, the nearest first.

    How far a head looks back is the angle between two constant vectors, its biases of q and k.
    """
    width, hidden = attention.head_dim, attention.q_proj.in_features
    num_heads = attention.q_proj.out_features // width
    code, *notes = (_orthonormal(width, hidden) for _ in range(1 + num_heads))
    for head, note in enumerate(notes):
        rows, angles = slice(head * width, (head + 1) * width), (head + 1) * steps
        attention.q_proj.bias[rows] = KEEN * torch.cat([angles.cos(), -angles.sin()])
        attention.k_proj.bias[rows] = KEEN * torch.cat([torch.ones_like(steps), torch.zeros_like(steps)])
        attention.v_proj.weight[rows] = code
        attention.o_proj.weight[:, rows] = NOTED * note.T
    return [code, *notes]


def _look_up(attention: Any, dims: Tensor, said: Sequence[Tensor], noted: Sequence[Tensor], *, gain: float) -> None:
    """What q says against what k has noted, one by one; the heads have a share each of what is copied."""
    width, hidden = attention.head_dim, attention.q_proj.in_features
    basis = _orthonormal(hidden, hidden)
    for start in range(0, hidden, width):
        rows = slice(start, start + width)
        for one, other in zip(said, noted, strict=True):
            mixed = MATCH * _orthonormal(width, width)[: len(dims)]
            attention.q_proj.weight[start + dims] += mixed @ one
            attention.k_proj.weight[start + dims] += mixed @ other
        attention.v_proj.weight[rows] = basis[rows]
        attention.o_proj.weight[:, rows] = gain * basis[rows].T


def _expect(attention: Any, dims: Tensor, wanted: Tensor, noted: Tensor) -> None:
    """Whatever is said, this note is looked for, too."""
    width = attention.head_dim
    for start in range(0, attention.q_proj.in_features, width):
        mixed = MATCH * _orthonormal(width, width)[: len(dims)]
        attention.q_proj.bias[start + dims] += mixed @ wanted
        attention.k_proj.weight[start + dims] += mixed @ noted


def _orthonormal(rows: int, columns: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(rows, columns))
