"""The verifiers: which draft tokens are accepted, and which token follows them.

One signature for every rule, batched over sequences. Greedy p and certain q are one-hot rows and
need no case of their own. p is the target's distribution, q the draft distribution; both are the
distributions that were really sampled from, after temperature, top-k, top-p, penalties and masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.sampling.distribution import WarpBatch
from specserve.sampling.drafts import DraftBatch
from specserve.sampling.noise import Purpose, row_keys, seed_array, uniform
from specserve.sampling.row_draws import draw_by_logits, draw_from_rows
from specserve.transfers import to_device

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class RandomStreams:
    """Keys of each sequence's randomness: its seed, and the round.

    A round is named by the number of tokens that were committed when it began.
    """

    seeds: NDArray[np.uint64]  # [seqs]
    rounds: NDArray[np.int64]  # [seqs]

    @classmethod
    def from_seeds(cls, seeds: Sequence[int], rounds: Sequence[int]) -> RandomStreams:
        return cls(seeds=seed_array(seeds), rounds=np.array(rounds, dtype=np.int64))

    def keys(self, purpose: Purpose, width: int, device: torch.device) -> Tensor:
        """Return keys [seqs, width, 2]; column j draws for position round + j."""
        rounds = self.rounds[:, None]
        return row_keys(
            self.seeds[:, None], rounds, rounds + np.arange(width), purpose, device=device
        )

    def select(self, index: NDArray[np.int64]) -> RandomStreams:
        return RandomStreams(seeds=self.seeds[index], rounds=self.rounds[index])


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Number of accepted draft tokens of each sequence, and the token that follows them.

    The next token is a correction if a draft token was rejected, and else the bonus.
    """

    accepted: Tensor  # [seqs] int64
    next_token: Tensor  # [seqs] int64


Verifier = Callable[[Tensor, DraftBatch, RandomStreams], VerifyResult]


def speculative(p: Tensor, drafts: DraftBatch, streams: RandomStreams) -> VerifyResult:
    """Accept x_i while u_i < p(x_i) / q(x_i); reject the rest (2211.17192, Algorithm 1).

    The correction is drawn from norm(max(0, p - q)), the bonus from p.
    """
    return _accept_until_rejection(p, drafts, streams, lenience=None)


def lenient(p: Tensor, drafts: DraftBatch, streams: RandomStreams) -> VerifyResult:
    """Accept x_i while u_i < l p(x_i) / q(x_i), with a lenience l.

    This is appendix A.5 of 2211.17192, whose l is our 1/l. It is lossy for l > 1, yet no token
    becomes more than l times as likely as under p.
    """
    return _accept_until_rejection(p, drafts, streams, lenience=drafts.lenience)


def block(p: Tensor, drafts: DraftBatch, streams: RandomStreams) -> VerifyResult:
    """Accept the longest prefix i with u_i <= h_i (block verification: 2403.10444, Algorithm 2).

    A longer prefix may pass where a shorter one did not. In expectation it accepts no fewer tokens
    than `speculative`. The correction is drawn from norm(max(0, P_tau p - q)), the bonus from p.
    """
    h, weight = block_acceptance(p, drafts)
    accepted = last_true((_accept_noise(drafts, streams) <= h) & drafts.valid)
    return VerifyResult(accepted, _correction_or_bonus(p, drafts, streams, accepted, weight))


def coupled(p: Tensor, drafts: DraftBatch, streams: RandomStreams) -> VerifyResult:
    """Accept draft tokens while they equal the target's own samples (2408.07978).

    Draft and target draw with the same Gumbel noise, keyed by seed and position. Correction and
    bonus are the target's sample.
    """
    cells = drafts.cells()
    rows = drafts.rows.flatten()[cells]  # [rows of these sequences]
    keys = streams.keys(Purpose.COUPLED, drafts.width, p.device).flatten(0, 1)[cells]
    own = torch.zeros_like(drafts.tokens).flatten()
    own[cells] = draw_from_rows(p, keys, rows)
    return accept_matching(own.view(drafts.tokens.shape), drafts)


VERIFIERS: dict[str, Verifier] = {
    "speculative": speculative,
    "block": block,
    "coupled": coupled,
    "lenient": lenient,
}


def verify(
    names: Sequence[str], p: Tensor, drafts: DraftBatch, streams: RandomStreams
) -> VerifyResult:
    """Verify each sequence under its own rule: `names` [seqs], p [rows, vocab]."""
    present = set(names)
    if len(present) == 1:
        return VERIFIERS[present.pop()](p, drafts, streams)
    labels = np.array(names)
    result = VerifyResult(torch.zeros_like(drafts.lengths), torch.zeros_like(drafts.lengths))
    for name in sorted(present):
        index = np.flatnonzero(labels == name)
        part = VERIFIERS[name](p, drafts.select(index), streams.select(index))
        where = to_device(index, p.device)
        result.accepted[where] = part.accepted
        result.next_token[where] = part.next_token
    return result


def draw_next(
    names: Sequence[str], warps: WarpBatch, logits: Tensor, streams: RandomStreams
) -> Tensor:  # [seqs]
    """Return the next token of sequences without draft tokens: a draw by logits [seqs, vocab].

    All rules come down to it, and `coupled` draws with its own noise.
    """
    is_coupled = np.array([name == "coupled" for name in names])
    purpose = Purpose.COUPLED if is_coupled.all() else Purpose.NEXT
    keys = streams.keys(purpose, 1, logits.device)[:, 0]
    if is_coupled.any() and not is_coupled.all():
        of_coupled = streams.keys(Purpose.COUPLED, 1, logits.device)[:, 0]
        keys = torch.where(to_device(is_coupled[:, None], logits.device), of_coupled, keys)
    return draw_by_logits(warps, logits, keys)


def verify_greedy(own: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the number of accepted draft tokens and the next token of each greedy sequence.

    `own` is the target's token in every row of p. Under greedy p, a one-hot, all rules come down to
    this comparison. It takes no tensors: at one sequence, making them would take longer than all
    the rest.
    """
    found, first = [], 0
    for tokens in drafts:
        accepted = 0
        while accepted < len(tokens) and tokens[accepted] == own[first + accepted]:
            accepted += 1
        found.append((accepted, own[first + accepted]))
        first += len(tokens) + 1
    return found


# The parts of the rules that are plain mathematics. They work in any precision, and the tests
# enumerate them in float64.


def accept_matching(own: Tensor, drafts: DraftBatch) -> VerifyResult:
    """Accept draft tokens while they equal `own`, the target's samples [seqs, width]."""
    accepted = num_leading_true((own == drafts.tokens) & drafts.valid)
    return VerifyResult(accepted, own.gather(1, accepted[:, None])[:, 0])


def block_acceptance(p: Tensor, drafts: DraftBatch) -> tuple[Tensor, Tensor]:
    """Return h_1.. of each prefix, [seqs, width], and the weights P_0.., [seqs, width + 1].

    2403.10444, Algorithm 2, with x_1..x_gamma the draft tokens:

        P_0 = 1,  P_i = min(1, P_{i-1} p(x_i) / q(x_i))
        S_i = sum_x max(0, P_i p(x | x_1..x_i) - q(x | x_1..x_i))
        h_i = S_i / (S_i + 1 - P_i) for i < gamma,  h_gamma = P_gamma

    q is 0 past the last draft token, so S_gamma = P_gamma and the formula for h_i gives
    h_gamma = P_gamma by itself.
    """
    ratio = drafts.p_at_tokens(p) / drafts.q_at_tokens().clamp(min=_TINY) * drafts.valid
    weights = [torch.ones_like(ratio[:, 0])]
    for i in range(drafts.width):
        weights.append((weights[-1] * ratio[:, i]).clamp(max=1))
    weight = torch.stack(weights, 1)  # [seqs, width + 1]
    # P_0..P_gamma; the column past the last draft token is P_gamma.
    inner = weight[:, : drafts.width]
    overlap = torch.minimum(
        inner[:, :, None] * drafts.p_at_support(p), drafts.q_probs
    )  # [seqs, width, support]
    # S_i = sum max(0, P p - q) = P - sum min(P p, q). A running sum, since its bits do not change
    # when zeros pad the support.
    surplus = (inner - overlap.cumsum(-1)[:, :, -1]).clamp(min=0)
    total = surplus + (1 - inner)
    h = torch.where(total > 0, surplus / total, 1)  # 0/0: P = 1 and the residual is empty
    return torch.cat([h[:, 1:], torch.zeros_like(h[:, :1])], 1) * drafts.valid, weight


def residual(
    p: Tensor, drafts: DraftBatch, accepted: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Return max(0, P p - q) in the row after the accepted tokens, [seqs, vocab], unnormalised.

    This is the distribution of the correction (2211.17192, Algorithm 1, with P = 1; 2403.10444,
    Algorithm 2). q is 0 past the last draft token, so there it is p, the bonus's distribution.
    """
    at = accepted[:, None]
    left = p[drafts.rows.gather(1, at)[:, 0]]  # a copy
    if weight is not None:
        left.mul_(weight.gather(1, at))
    at = at[:, :, None].expand(-1, 1, drafts.q_ids.shape[-1])
    left.scatter_add_(1, drafts.q_ids.gather(1, at)[:, 0], -drafts.q_probs.gather(1, at)[:, 0])
    return left.clamp_(min=0)


def num_leading_true(passed: Tensor) -> Tensor:
    """Count the true values before the first false one: [seqs, width] -> [seqs]."""
    return passed.long().cumprod(-1).sum(-1)


def last_true(passed: Tensor) -> Tensor:
    """Return the number (from 1) of the last true value, 0 if none is: [seqs, width] -> [seqs]."""
    return (passed * torch.arange(1, passed.shape[-1] + 1, device=passed.device)).amax(-1)


def _accept_until_rejection(
    p: Tensor, drafts: DraftBatch, streams: RandomStreams, lenience: Tensor | None
) -> VerifyResult:
    limit = drafts.p_at_tokens(p)
    if lenience is not None:
        limit = limit * lenience
    # u q < p: strict and without division. u <= p/q would accept a token of probability 0.
    accepted = num_leading_true(
        (_accept_noise(drafts, streams) * drafts.q_at_tokens() < limit) & drafts.valid
    )
    return VerifyResult(accepted, _correction_or_bonus(p, drafts, streams, accepted, None))


def _accept_noise(drafts: DraftBatch, streams: RandomStreams) -> Tensor:
    return uniform(streams.keys(Purpose.ACCEPT, drafts.width, drafts.tokens.device))


def _correction_or_bonus(
    p: Tensor, drafts: DraftBatch, streams: RandomStreams, accepted: Tensor, weight: Tensor | None
) -> Tensor:
    """Draw the next token of each sequence from its residual."""
    keys = streams.keys(Purpose.NEXT, drafts.width, p.device)
    at = accepted[:, None]
    own_keys = keys.gather(1, at[:, :, None].expand(-1, 1, 2))[:, 0]
    left = residual(p, drafts, accepted, weight)
    is_empty = left.amax(-1, keepdim=True) <= 0
    if not p.is_cpu or bool(is_empty.any()):  # a GPU would be waited for
        # p and q are equal up to rounding: then the draw is from p itself.
        left = torch.where(is_empty, p[drafts.rows.gather(1, at)[:, 0]], left)
    return draw_from_rows(left, own_keys)
