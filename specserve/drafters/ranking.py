"""Rank the tokens that may come at a position by the draft model's logits.

Where draft and target share their noise, it is part of the ranking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specserve.sampling.noise import Purpose, row_keys
from specserve.sampling.noise import exponential as exponential_noise
from specserve.transfers import to_device, to_host
from specserve.types import Policy

NUM_CONSIDERED = 2048
"""Likeliest tokens that are ranked: shared noise lifts one from far down now and then."""


@dataclass(frozen=True, slots=True)
class PositionLogits:
    """The draft model's logits at one position of a sequence."""

    logits: Tensor  # [vocab], penalties and biases included
    policy: Policy
    position: int
    draft_token: int | None
    """The draft token there; None at the position behind the last."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The likeliest tokens at a position if its draft token is rejected, which is left out.

    `probs` are conditional on the rejection.
    """

    tokens: tuple[int, ...]
    probs: tuple[float, ...]
    confidence: float
    """Probability of the draft token itself; 0 at the position behind the last."""


def draw_mode(policy: Policy) -> str:
    """Return how tokens are drawn. Estimates are comparable between sequences of one mode."""
    if policy.warp.temperature == 0:
        return "greedy"
    return "coupled" if policy.verifier == "coupled" else "sampled"


def rank_next_tokens(positions: Sequence[PositionLogits], width: int) -> list[Ranking]:
    """Return a ranking of at most `width` tokens for each position."""
    logits = torch.stack([each.logits.float() for each in positions])  # [positions, vocab]
    temperatures = to_device(
        np.array([each.policy.warp.temperature or 1.0 for each in positions], np.float32),
        logits.device,
    )
    top, ids = (logits / temperatures[:, None]).topk(
        min(NUM_CONSIDERED, logits.shape[1]), dim=-1
    )  # both [positions, considered]
    coupled = [draw_mode(each.policy) == "coupled" for each in positions]
    if any(coupled):
        top = torch.where(
            to_device(np.array(coupled), top.device)[:, None],
            top - _noise(positions, ids).log(),
            top,
        )
    probs, order = top.softmax(-1).sort(dim=-1, descending=True)
    ids = ids.gather(1, order)
    kept = width + 1
    top_ids, top_probs = to_host(ids[:, :kept], probs[:, :kept])
    num_possible = (top_probs > 0).sum(-1).tolist()  # a grammar may leave fewer
    return [
        _without_draft_token(each.draft_token, tokens[:num], of_tokens[:num], width)
        for each, tokens, of_tokens, num in zip(
            positions, top_ids.tolist(), top_probs.tolist(), num_possible, strict=True
        )
    ]


def _noise(positions: Sequence[PositionLogits], ids: Tensor) -> Tensor:  # [positions, considered]
    seeds = [each.policy.seed for each in positions]
    indices = np.array([each.position for each in positions])
    keys = row_keys(seeds, indices, indices, Purpose.COUPLED, device=ids.device)
    return exponential_noise(keys, ids)


def _without_draft_token(
    draft_token: int | None, tokens: list[int], probs: list[float], width: int
) -> Ranking:
    if draft_token is None or draft_token not in tokens:
        return Ranking(tuple(tokens[:width]), tuple(probs[:width]), 0.0)
    index = tokens.index(draft_token)
    confidence = probs.pop(index)
    del tokens[index]
    rest = max(1 - confidence, 1e-9)
    return Ranking(tuple(tokens), tuple(prob / rest for prob in probs), confidence)
