"""What a draft model thinks may stand at a place, likeliest first: by its logits, and by the noise that the target will use, where it is shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specserve.sampling.noise import Purpose, row_keys
from specserve.sampling.noise import exponential as exponential_noise
from specserve.types import Policy

CONSIDERED = 2048  # of the likeliest tokens: shared noise lifts one from far down now and then


@dataclass(frozen=True, slots=True)
class Sight:
    """One place: the logits of the draft there, and whose text it belongs to."""

    logits: Tensor  # [vocab] penalties and biases included
    policy: Policy
    position: int
    drawn: int | None  # the draft token there; None behind the last


@dataclass(frozen=True, slots=True)
class Ranked:
    """Without the draft token: what may come where that was refused. Shares are of what is left then."""

    tokens: tuple[int, ...]
    shares: tuple[float, ...]
    trust: float  # the share of the draft token itself; 0 behind the last


def mode(policy: Policy) -> str:
    """Opinions of one mode are comparable."""
    if policy.warp.temperature == 0:
        return "greedy"
    return "coupled" if policy.verifier == "coupled" else "sampled"


def ranked(sights: Sequence[Sight], width: int) -> list[Ranked]:
    """All places at once."""
    logits = torch.stack([sight.logits.float() for sight in sights])  # [places, vocab]
    heats = torch.tensor(
        [sight.policy.warp.temperature or 1.0 for sight in sights], device=logits.device
    )
    top, ids = (logits / heats[:, None]).topk(min(CONSIDERED, logits.shape[1]), dim=-1)
    coupled = [mode(sight.policy) == "coupled" for sight in sights]
    if any(coupled):
        top = torch.where(
            torch.tensor(coupled, device=top.device)[:, None], top - _noise(sights, ids).log(), top
        )
    shares, order = top.softmax(-1).sort(dim=-1, descending=True)
    ids = ids.gather(1, order)
    kept = width + 1
    possible = (shares[:, :kept] > 0).sum(-1).tolist()  # a grammar may leave fewer
    return [
        _without_drawn(sight.drawn, tokens[:num], of[:num], width)
        for sight, tokens, of, num in zip(
            sights, ids[:, :kept].tolist(), shares[:, :kept].tolist(), possible, strict=True
        )
    ]


def _noise(sights: Sequence[Sight], ids: Tensor) -> Tensor:  # [places, considered]
    seeds, positions = (
        [sight.policy.seed for sight in sights],
        np.array([sight.position for sight in sights]),
    )
    return exponential_noise(
        row_keys(seeds, positions, positions, Purpose.COUPLED, device=ids.device), ids
    )


def _without_drawn(drawn: int | None, tokens: list[int], shares: list[float], width: int) -> Ranked:
    if drawn is None or drawn not in tokens:
        return Ranked(tuple(tokens[:width]), tuple(shares[:width]), 0.0)
    at = tokens.index(drawn)
    trust = shares.pop(at)
    del tokens[at]
    rest = max(1 - trust, 1e-9)
    return Ranked(tuple(tokens), tuple(share / rest for share in shares), trust)
