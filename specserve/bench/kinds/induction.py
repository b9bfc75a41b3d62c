"""Induction heads, written into the first two layers of a Llama before it learns: what gradients take longest to find.

Layer 0 notes in every place what stood 1, 2 and 3 places before. Layer 1 looks for the place whose notes are what has just been written, and
copies what stands there. All of it is rough, and free to change in training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BACK = (1, 2, 3)  # how far the heads of layer 0 look back
SPREAD = 0.12  # of embeddings, which are the vocabulary head as well: so far apart that what is copied is the likeliest token
KEEN = 8.0  # biases of q and k: how surely a head looks to one place
NOTED = 0.18  # gain: a note is about as long as the embedding that it lies beside
COPIED = 1.0  # likewise; what is copied outweighs the token that it comes behind
MATCH = 1.5  # gain of q and k, by parts
SLOW = 0.006  # radians a place: rotary dimensions that have hardly turned within a text


@torch.no_grad()
def induce(model: Any) -> None:
    """With biases in its attention, and a key for every query head."""
    nn.init.normal_(model.get_input_embeddings().weight, std=SPREAD)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    steps = model.model.rotary_emb.inv_freq  # [width / 2], radians a place
    code, notes = _look_back(first, steps)
    _look_up(second, steps < SLOW, code, notes)


def _look_back(attention: Any, steps: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The angle between two constant vectors, its biases of q and k, says how far back a head looks. What tokens are noted as, and where."""
    width, hidden = attention.head_dim, attention.q_proj.in_features
    code, *notes = (_orthonormal(width, hidden) for _ in range(1 + len(BACK)))
    for head, (back, note) in enumerate(zip(BACK, notes, strict=True)):
        rows = slice(head * width, (head + 1) * width)
        attention.q_proj.bias[rows] = KEEN * torch.cat([(back * steps).cos(), -(back * steps).sin()])
        attention.k_proj.bias[rows] = KEEN * torch.cat([torch.ones_like(steps), torch.zeros_like(steps)])
        attention.v_proj.weight[rows] = code
        attention.o_proj.weight[:, rows] = NOTED * note.T
    return code, notes


def _look_up(attention: Any, slow: Tensor, code: Tensor, notes: list[Tensor]) -> None:
    """The last tokens, as q says them, against those before a place, as k has them noted; the heads have a share of what is copied each."""
    width, hidden = attention.head_dim, attention.q_proj.in_features
    num_heads, dims = attention.q_proj.out_features // width, torch.cat([slow, slow]).nonzero()[:, 0]
    basis = _orthonormal(hidden, hidden)
    for head in range(num_heads):
        rows = slice(head * width, (head + 1) * width)
        for said, noted in zip((code, *notes), notes, strict=False):
            mixed = MATCH * _orthonormal(width, width)[: len(dims)]
            attention.q_proj.weight[rows.start + dims] += mixed @ said
            attention.k_proj.weight[rows.start + dims] += mixed @ noted
        attention.v_proj.weight[rows] = basis[rows]
        attention.o_proj.weight[:, rows] = COPIED * basis[rows].T


def _orthonormal(rows: int, columns: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(rows, columns))
