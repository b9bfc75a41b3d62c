"""The verifiers: which draft tokens stand, and which token comes next. One signature for every rule, batched over sequences.

Greedy p and certain q are one-hot rows and need no case of their own. Letters and rules are those of exactness.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.sampling.distribution import argmax, sample
from specserve.sampling.drafts import Drafts
from specserve.sampling.noise import (
    Purpose,
    exponential,
    row_keys,
    rows_at_once,
    seed_array,
    uniform,
)

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Streams:
    """Where the randomness of each sequence comes from: its seed, and the committed length that the round starts from."""

    seeds: NDArray[np.uint64]  # [seqs]
    rounds: NDArray[np.int64]  # [seqs]

    @classmethod
    def of(cls, seeds: Sequence[int], rounds: Sequence[int]) -> Streams:
        return cls(seeds=seed_array(seeds), rounds=np.array(rounds, dtype=np.int64))

    def keys(self, purpose: Purpose, width: int, device: torch.device) -> Tensor:
        """[seqs, width, 2]: column j draws for position round + j."""
        rounds = self.rounds[:, None]
        return row_keys(
            self.seeds[:, None], rounds, rounds + np.arange(width), purpose, device=device
        )

    def select(self, index: NDArray[np.int64]) -> Streams:
        return Streams(seeds=self.seeds[index], rounds=self.rounds[index])


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of each sequence: how many draft tokens stand, and the token behind them."""

    accepted: Tensor  # [seqs] int64
    next_token: Tensor  # [seqs] int64


Verifier = Callable[[Tensor, Drafts, Streams], Outcome]


def speculative(p: Tensor, drafts: Drafts, streams: Streams) -> Outcome:
    """Rule 1 (2211.17192, Algorithm 1): accept while u < p/q, then draw from max(0, p - q)."""
    return _leading(p, drafts, streams, lenience=None)


def lenient(p: Tensor, drafts: Drafts, streams: Streams) -> Outcome:
    """Rule 10: accept while u < l p/q. Lossy for l > 1, yet no token becomes more than l times as likely as it is."""
    return _leading(p, drafts, streams, lenience=drafts.lenience)


def block(p: Tensor, drafts: Drafts, streams: Streams) -> Outcome:
    """Rule 6 (2403.10444): the longest prefix that passes stands, even if a shorter one did not. Never shorter in expectation."""
    h, weight = block_acceptance(p, drafts)
    accepted = largest_true((_accept_noise(drafts, streams) <= h) & drafts.valid)
    return Outcome(accepted, _next_token(p, drafts, streams, accepted, weight))


def coupled(p: Tensor, drafts: Drafts, streams: Streams) -> Outcome:
    """Rule 7 (2408.07978): the target's own sample decides. Noise is keyed by seed and position, and the drafter saw the same."""
    rows = drafts.rows[drafts.in_row]  # [rows of these sequences]
    keys = streams.keys(Purpose.COUPLED, drafts.width, p.device)[drafts.in_row]
    own = torch.zeros_like(drafts.tokens)
    own[drafts.in_row] = _own_tokens(p, rows, keys)
    return agreement(own, drafts)


VERIFIERS: dict[str, Verifier] = {
    "speculative": speculative,
    "block": block,
    "coupled": coupled,
    "lenient": lenient,
}


def verify(names: Sequence[str], p: Tensor, drafts: Drafts, streams: Streams) -> Outcome:
    """Each sequence under its own rule, `names` [seqs]; p [rows, vocab]."""
    present = set(names)
    if len(present) == 1:
        return VERIFIERS[present.pop()](p, drafts, streams)
    labels = np.array(names)
    outcome = Outcome(torch.zeros_like(drafts.lengths), torch.zeros_like(drafts.lengths))
    for name in sorted(present):
        index = np.flatnonzero(labels == name)
        part = VERIFIERS[name](p, drafts.select(index), streams.select(index))
        where = torch.from_numpy(index).to(p.device)
        outcome.accepted[where] = part.accepted
        outcome.next_token[where] = part.next_token
    return outcome


def agree(own: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Greedy, where p is a one-hot and all rules are this one comparison: of each sequence, how many drafts stand and what follows.

    `own` is the target's token in every row of p. It takes no tensors: at one sequence, making them would take longer than all the rest.
    """
    found, first = [], 0
    for tokens in drafts:
        stand = 0
        while stand < len(tokens) and tokens[stand] == own[first + stand]:
            stand += 1
        found.append((stand, own[first + stand]))
        first += len(tokens) + 1
    return found


# The parts of the rules that are plain mathematics; they work in any precision, and the tests enumerate them in float64.


def agreement(own: Tensor, drafts: Drafts) -> Outcome:
    """Draft tokens stand while they are the target's own, [seqs, width]; then comes the target's."""
    accepted = leading_true((own == drafts.tokens) & drafts.valid)
    return Outcome(accepted, own.gather(1, accepted[:, None])[:, 0])


def acceptance(p: Tensor, drafts: Drafts, lenience: Tensor | None = None) -> Tensor:
    """min(1, l p/q) of each draft token, [seqs, width]."""
    ratio = drafts.p_at_tokens(p) / drafts.q_at_tokens().clamp(min=_TINY)
    return (ratio if lenience is None else ratio * lenience).clamp(max=1) * drafts.valid


def block_acceptance(p: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
    """h_1.. of each prefix, [seqs, width], and the weights P_0.., [seqs, width + 1] (2403.10444, Algorithm 2).

    q is 0 past the last draft token, so S_gamma = P_gamma and the formula for h_i gives h_gamma = P_gamma by itself.
    """
    ratio = drafts.p_at_tokens(p) / drafts.q_at_tokens().clamp(min=_TINY) * drafts.valid
    weights = [torch.ones_like(ratio[:, 0])]
    for i in range(drafts.width):
        weights.append((weights[-1] * ratio[:, i]).clamp(max=1))
    weight = torch.stack(weights, 1)  # [seqs, width + 1]
    inner = weight[
        :, : drafts.width
    ]  # P_0..P_gamma, the column past the last draft token being P_gamma
    overlap = torch.minimum(
        inner[:, :, None] * drafts.p_at_support(p), drafts.q_probs
    )  # [seqs, width, support]
    # S_i = sum max(0, P p - q) = P - sum min(P p, q). A running sum, since its bits do not change when zeros pad the support.
    stop = (inner - overlap.cumsum(-1)[:, :, -1]).clamp(min=0)
    total = stop + (1 - inner)
    h = torch.where(total > 0, stop / total, 1)  # 0/0: P = 1 and nothing is left over
    return torch.cat([h[:, 1:], torch.zeros_like(h[:, :1])], 1) * drafts.valid, weight


def residual(p: Tensor, drafts: Drafts, accepted: Tensor, weight: Tensor | None = None) -> Tensor:
    """max(0, P p - q) in the row where each sequence stopped, [seqs, vocab], not normalised; q is 0 past the last draft token."""
    at = accepted[:, None]
    left = p[drafts.rows.gather(1, at)[:, 0]]  # a copy
    if weight is not None:
        left.mul_(weight.gather(1, at))
    at = at[:, :, None].expand(-1, 1, drafts.q_ids.shape[-1])
    left.scatter_add_(1, drafts.q_ids.gather(1, at)[:, 0], -drafts.q_probs.gather(1, at)[:, 0])
    return left.clamp_(min=0)


def leading_true(passed: Tensor) -> Tensor:
    """How many are true before the first that is not: [seqs, width] -> [seqs]."""
    return passed.long().cumprod(-1).sum(-1)


def largest_true(passed: Tensor) -> Tensor:
    """The number (from 1) of the last that is true, 0 if none is: [seqs, width] -> [seqs]."""
    return (passed * torch.arange(1, passed.shape[-1] + 1, device=passed.device)).amax(-1)


def _leading(p: Tensor, drafts: Drafts, streams: Streams, lenience: Tensor | None) -> Outcome:
    limit = drafts.p_at_tokens(p)
    if lenience is not None:
        limit = limit * lenience
    # Strict and without division: u <= p/q would let a token of probability 0 pass.
    accepted = leading_true(
        (_accept_noise(drafts, streams) * drafts.q_at_tokens() < limit) & drafts.valid
    )
    return Outcome(accepted, _next_token(p, drafts, streams, accepted, None))


def _accept_noise(drafts: Drafts, streams: Streams) -> Tensor:
    return uniform(streams.keys(Purpose.ACCEPT, drafts.width, drafts.tokens.device))


def _own_tokens(p: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """A draw from each of these rows of p, a few rows at a time."""
    vocabulary, step = _vocabulary(p), rows_at_once(p)
    parts = [slice(first, first + step) for first in range(0, len(rows), step)]
    return torch.cat([sample(p[rows[part]], exponential(keys[part], vocabulary)) for part in parts])


def _next_token(
    p: Tensor, drafts: Drafts, streams: Streams, accepted: Tensor, weight: Tensor | None
) -> Tensor:
    keys = streams.keys(Purpose.NEXT, drafts.width, p.device)
    at = accepted[:, None]
    noise = exponential(keys.gather(1, at[:, :, None].expand(-1, 1, 2))[:, 0], _vocabulary(p))
    score = residual(p, drafts, accepted, weight) / noise  # [seqs, vocab]
    token = argmax(score)
    possible = score.gather(1, token[:, None])[:, 0] > 0
    if bool(possible.all()):
        return token
    # p and q are equal up to rounding and nothing is left over: then the draw is from p itself.
    return torch.where(possible, token, sample(p[drafts.rows.gather(1, at)[:, 0]], noise))


def _vocabulary(p: Tensor) -> Tensor:
    return torch.arange(p.shape[-1], dtype=torch.int32, device=p.device)
