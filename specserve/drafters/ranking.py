"""Rank the tokens that may come at a position by the draft model's logits.

Where draft and target share their noise, it is part of the ranking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.drafters.base import NO_TOKEN, OutcomeForecast
from specserve.sampling.noise import Purpose, row_keys
from specserve.sampling.noise import exponential as exponential_noise
from specserve.transfers import to_device, to_host
from specserve.types import Policy

NUM_CONSIDERED = 2048
"""Likeliest tokens that shared noise may lift to the top, one from far down now and then."""
MIN_REST = 1e-9
"""A draft token is rejected with at least this probability."""


@dataclass(frozen=True, slots=True)
class PositionLogits:
    """The draft model's logits at one position of a sequence."""

    logits: Tensor  # [vocab], penalties and biases included
    policy: Policy
    position: int
    draft_token: int | None
    """The draft token there; None at the position after the last."""


@dataclass(frozen=True, slots=True)
class Rankings:
    """The likeliest tokens at each position of a sequence, if its draft token is rejected.

    The draft token itself is left out, and `probs` are conditional on its rejection.
    """

    tokens: NDArray[np.int64]  # [positions, rank]; NO_TOKEN where a grammar leaves fewer
    probs: NDArray[np.float64]  # [positions, rank]
    confidence: NDArray[np.float64]
    """[positions] probability of the draft token; 0 at the position after the last."""

    def forecast(
        self, seq_id: int, start: int, drafts: Sequence[int], policy: Policy
    ) -> OutcomeForecast:
        """Return the forecast for these draft tokens, which continue a prefix of that length."""
        return OutcomeForecast(
            seq_id,
            start,
            tuple(drafts),
            next_tokens=self.tokens,
            confidence=self.confidence[:-1],
            next_probs=self.probs,
            mode=draw_mode(policy),
        )


def draw_mode(policy: Policy) -> str:
    """Return how tokens are drawn. Estimates are comparable between sequences of one mode."""
    if policy.warp.temperature == 0:
        return "greedy"
    return "coupled" if policy.verifier == "coupled" else "sampled"


def rank_next_tokens(sequences: Sequence[Sequence[PositionLogits]], width: int) -> list[Rankings]:
    """Return rankings of at most `width` tokens for the positions of each sequence."""
    positions = list(chain.from_iterable(sequences))
    logits = torch.stack([each.logits.float() for each in positions])  # [positions, vocab]
    device = logits.device
    temperatures = [each.policy.warp.temperature or 1.0 for each in positions]
    logits /= to_device(np.array(temperatures, np.float32), device)[:, None]
    drafts = np.array(
        [NO_TOKEN if each.draft_token is None else each.draft_token for each in positions]
    )
    coupled = np.array([draw_mode(each.policy) == "coupled" for each in positions])
    kept, of_draft = min(width + 1, logits.shape[1]), to_device(drafts.clip(0), device)[:, None]
    if coupled.any():
        considered, ids = logits.topk(min(NUM_CONSIDERED, logits.shape[1]), dim=-1)
        shared = considered - _noise(positions, ids).log()
        considered = torch.where(to_device(coupled, device)[:, None], shared, considered)
        log_sum = considered.logsumexp(-1, keepdim=True)
        of_draft = torch.where(ids == of_draft, considered, -torch.inf).amax(-1, keepdim=True)
        top, order = considered.topk(kept, dim=-1)
        ids = ids.gather(1, order)
    else:
        log_sum = logits.logsumexp(-1, keepdim=True)
        of_draft = logits.gather(1, of_draft)
        top, ids = logits.topk(kept, dim=-1)
    probabilities = torch.cat([of_draft, top], dim=1).sub_(log_sum).exp_()
    tokens, host_probs = to_host(ids, probabilities)
    # A broken draft's logits are not finite: nothing is likely then.
    probs = np.nan_to_num(host_probs.astype(np.float64), nan=0.0, posinf=0.0)
    return _of_sequences(
        _without_drafts(
            tokens,
            probs[:, 1:],
            np.where(drafts == NO_TOKEN, 0.0, probs[:, 0]),
            drafts,
            width,
        ),
        [len(each) for each in sequences],
    )


def _noise(positions: Sequence[PositionLogits], ids: Tensor) -> Tensor:  # [positions, considered]
    seeds = [each.policy.seed for each in positions]
    indices = np.array([each.position for each in positions])
    keys = row_keys(seeds, indices, indices, Purpose.COUPLED, device=ids.device)
    return exponential_noise(keys, ids)


def _without_drafts(
    tokens: NDArray[np.int64],  # [positions, width + 1], likeliest first
    probs: NDArray[np.float64],
    confidence: NDArray[np.float64],  # [positions]
    drafts: NDArray[np.int64],
    width: int,
) -> Rankings:
    """Return the rankings without each position's draft token, or else without the last one."""
    order = np.argsort(tokens == drafts[:, None], axis=1, kind="stable")[:, :width]
    tokens, probs = np.take_along_axis(tokens, order, 1), np.take_along_axis(probs, order, 1)
    rest = np.maximum(1 - confidence, MIN_REST)[:, None]
    is_possible = (probs > 0) & (tokens != drafts[:, None])
    return Rankings(
        np.where(is_possible, tokens, NO_TOKEN), np.where(is_possible, probs / rest, 0), confidence
    )


def _of_sequences(rankings: Rankings, counts: Sequence[int]) -> list[Rankings]:
    """Divide the rankings of all positions into each sequence's."""
    stops = np.cumsum(counts)
    return [
        Rankings(
            rankings.tokens[stop - count : stop],
            rankings.probs[stop - count : stop],
            rankings.confidence[stop - count : stop],
        )
        for stop, count in zip(stops, counts, strict=True)
    ]
