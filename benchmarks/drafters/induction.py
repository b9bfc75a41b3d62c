"""Induction heads, written into a Llama of three layers before it learns: what gradients take longest to find.

Layer 0 notes in every place which tokens stood just before. Layer 1 marks every place whose token is to be replaced with what replaces it. Layer 2
looks for the place whose notes are what has just been written, and copies what stands there. All of it is rough, and free to change in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TOKEN = 64  # dimensions that embeddings begin in; the others are for notes
SPREAD = 0.17  # of embeddings there
KEEN = 8.0  # biases of q and k: how surely a head looks to one place
NOTED = 0.1  # gain: a note is about as long as the embedding that it lies beside
OWN = 0.57  # the embedding, as a share of all that lies in a place
COPIED, REPLACED = 1.0, 0.35  # gains; what is copied outweighs the token that it comes behind
MATCH, CERTAIN = 1.2, 2.0  # gains of q and k, where several matches add up and where one must do
RELUCTANT = 0.5  # of a match: how much better than one match the first place is, which is looked to where nothing is to be replaced
SLOW = 0.006  # radians a place: rotary dimensions that have hardly turned within a text


@torch.no_grad()
def induce(model: Any, begin: int) -> None:
    """With biases in its attention, and a key for every query head. Two places behind the token `begin` is what replaces the one before it."""
    embedding = model.get_input_embeddings().weight
    nn.init.normal_(embedding[:, :TOKEN], std=SPREAD)
    embedding[:, TOKEN:] = 0
    first, second, third = (layer.self_attn for layer in model.model.layers)
    steps = model.model.rotary_emb.inv_freq  # [width / 2], radians a place
    dims = torch.cat([steps < SLOW] * 2).nonzero()[:, 0]
    start = OWN * F.rms_norm(embedding[begin], embedding[begin].shape)
    code, *notes = _look_back(first, steps)
    _look_up(second, dims, (code,), notes[:1], gain=REPLACED, match=CERTAIN)
    _expect(second, dims, code @ start, notes[1])
    _expect(second, dims, RELUCTANT * code @ start, code)
    _hide(second, start)
    _look_up(third, dims, (code, *notes[:-1]), notes, gain=COPIED, match=MATCH)


def _look_back(attention: Any, steps: Tensor) -> list[Tensor]:
    """Each head a place further, as long as there is room for its notes. What tokens are noted as, and where the notes lie, the nearest first.

    How far a head looks back is the angle between two constant vectors, its biases of q and k.
    """
    width, hidden = attention.head_dim, attention.q_proj.in_features
    code = F.pad(_orthonormal(width, TOKEN), (0, hidden - TOKEN))
    notes = [torch.eye(hidden)[start : start + width] for start in range(TOKEN, hidden, width)]
    for back, (note, rows) in enumerate(zip(notes, _heads(attention), strict=False), 1):
        angles = back * steps
        attention.q_proj.bias[rows] = KEEN * torch.cat([angles.cos(), -angles.sin()])
        attention.k_proj.bias[rows] = KEEN * torch.cat(
            [torch.ones_like(steps), torch.zeros_like(steps)]
        )
        attention.v_proj.weight[rows] = code
        attention.o_proj.weight[:, rows] = NOTED * note.T
    return [code, *notes]


def _look_up(
    attention: Any,
    dims: Tensor,
    said: Sequence[Tensor],
    noted: Sequence[Tensor],
    *,
    gain: float,
    match: float,
) -> None:
    """What q says against what k has noted, one by one; each head copies a share of the embedding that it finds."""
    width, hidden = attention.head_dim, attention.q_proj.in_features
    basis = F.pad(_orthonormal(TOKEN, TOKEN), (0, hidden - TOKEN))
    for rows in _heads(attention):
        share = basis[rows % TOKEN]
        for one, other in zip(said, noted, strict=True):
            mixed = match * _orthonormal(width, width)[: len(dims)]
            attention.q_proj.weight[rows[dims]] += mixed @ one
            attention.k_proj.weight[rows[dims]] += mixed @ other
        attention.v_proj.weight[rows] = share
        attention.o_proj.weight[:, rows] = gain * TOKEN / hidden * share.T


def _expect(attention: Any, dims: Tensor, wanted: Tensor, noted: Tensor) -> None:
    """Whatever is said, this note is looked for, too."""
    for rows in _heads(attention):
        mixed = CERTAIN * _orthonormal(attention.head_dim, attention.head_dim)[: len(dims)]
        attention.q_proj.bias[rows[dims]] += mixed @ wanted
        attention.k_proj.weight[rows[dims]] += mixed @ noted


def _hide(attention: Any, seen: Tensor) -> None:
    """To look there copies nothing."""
    attention.v_proj.weight -= torch.outer(attention.v_proj.weight @ seen, seen) / seen.dot(seen)


def _heads(attention: Any) -> Iterator[Tensor]:
    """The rows of each."""
    for start in range(0, attention.q_proj.out_features, attention.head_dim):
        yield torch.arange(start, start + attention.head_dim)


def _orthonormal(rows: int, columns: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(rows, columns))
