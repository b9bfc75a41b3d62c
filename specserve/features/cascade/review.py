"""Review a smaller drafter's tokens by a larger one: rule 1, and q of each token that results.

docs/design/drafters.md says why it is exact. Knows no models and no texts; everything lies on the
reviewing stage's own support.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.drafters.neural.draws import COUPLED_SUPPORT, ignore_ids, top_support
from specserve.drafters.ranking import draw_mode
from specserve.features.cascade.sequence import TokenProbs
from specserve.sampling.distribution import WarpBatch, sample
from specserve.sampling.drafts import supports
from specserve.sampling.noise import Purpose, exponential, row_keys, seed_array, uniform
from specserve.sampling.penalties import History
from specserve.sampling.verify import verify_greedy
from specserve.types import Policy, SparseDistribution


@dataclass(frozen=True, slots=True)
class ReviewRequest:
    """Draft tokens of one sequence to review, from `position` on, and their distributions.

    The policy's seed is the reviewing stage's own.
    """

    position: int
    tokens: Sequence[int]
    draft_probs: Sequence[TokenProbs]
    policy: Policy
    history: History | None = None  # None without penalties and rule


@dataclass(frozen=True, slots=True)
class ReviewResult:
    """The result of a review: `accepted` draft tokens, then `next_token`.

    `draft_probs` are the distributions of all of these, whichever stage they are from.
    """

    accepted: int
    next_token: int
    draft_probs: Sequence[TokenProbs]


def review(
    logits: Tensor, requests: Sequence[ReviewRequest], *, support: int, lenience: float
) -> list[ReviewResult]:
    """Review each sequence's draft tokens under its own policy.

    logits [rows, vocab]: a row for each draft token of a sequence and one more.
    """
    modes = [draw_mode(request.policy) for request in requests]
    if len(set(modes)) == 1:
        return RULES[modes[0]](logits, requests, support, lenience)
    stops = np.cumsum([len(request.tokens) + 1 for request in requests])
    results: dict[int, ReviewResult] = {}
    for mode in sorted(set(modes)):
        own = [i for i, other in enumerate(modes) if other == mode]
        rows = np.concatenate(
            [np.arange(stops[i] - len(requests[i].tokens) - 1, stops[i]) for i in own]
        )
        part = RULES[mode](
            logits[torch.from_numpy(rows).to(logits.device)],
            [requests[i] for i in own],
            support,
            lenience,
        )
        results |= dict(zip(own, part, strict=True))
    return [results[i] for i in range(len(requests))]


def _greedy(
    logits: Tensor, requests: Sequence[ReviewRequest], support: int, lenience: float
) -> list[ReviewResult]:
    return _accept_equal(_warps(requests).greedy_tokens(logits).tolist(), requests)


def _coupled(
    logits: Tensor, requests: Sequence[ReviewRequest], support: int, lenience: float
) -> list[ReviewResult]:
    """Accept the tokens that this stage draws itself, with the noise that the target will use."""
    ids, probs = _top_support(logits, requests, COUPLED_SUPPORT)
    own = sample(probs, exponential(_keys(requests, Purpose.COUPLED, logits.device), ids))
    return _accept_equal(ids.gather(1, own[:, None])[:, 0].tolist(), requests)


def _sampled(
    logits: Tensor, requests: Sequence[ReviewRequest], support: int, lenience: float
) -> list[ReviewResult]:
    """Apply rule 1, with l between drafters.

    Accept while u < l q1/q2, else draw from max(0, q1 - q2). After the last draft token q2 is 0.
    """
    ids, q1 = _top_support(logits, requests, support)
    tokens, ids2, probs2 = (
        part.to(ids.device) for part in _draft_rows(requests)
    )  # [rows], and twice [rows, support of the draft tokens]
    # q1 and q2 of each draft token.
    q1_at_tokens = _probs_at(tokens[:, None], ids, q1)[:, 0]
    q2_at_tokens = _probs_at(tokens[:, None], ids2, probs2)[:, 0]
    u = uniform(_keys(requests, Purpose.ACCEPT, ids.device))
    passed = u * q2_at_tokens < lenience * q1_at_tokens
    # q2 on the support of q1.
    q2 = _probs_at(ids, ids2, probs2)
    residual = (q1 - q2).clamp_(min=0)
    # Where q1 and q2 are equal but for rounding, nothing is rejected.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, q1)
    corrections = ids.gather(
        1, sample(residual, exponential(_keys(requests, Purpose.NEXT, ids.device), ids))[:, None]
    )[:, 0]
    q = q1 if lenience == 1 else _lenient_probs(q1, q2, residual, lenience)
    return _accept_passed(
        requests,
        passed.tolist(),
        corrections.tolist(),
        SparseDistribution(ids.cpu().numpy(), q.cpu().numpy()),
    )


RULES: dict[str, Callable[[Tensor, Sequence[ReviewRequest], int, float], list[ReviewResult]]] = {
    "greedy": _greedy,
    "coupled": _coupled,
    "sampled": _sampled,
}


def _lenient_probs(q1: Tensor, q2: Tensor, residual: Tensor, lenience: float) -> Tensor:
    """Return the distribution of the resulting token.

    It is an accepted draft token with min(q2, l q1), else a correction. With l = 1 this is q1.
    """
    kept = torch.minimum(q2, lenience * q1)
    return kept + (1 - kept.sum(-1, keepdim=True)).clamp_(min=0) * residual / residual.sum(
        -1, keepdim=True
    )


def _accept_passed(
    requests: Sequence[ReviewRequest],
    passed: list[bool],
    corrections: list[int],
    q: SparseDistribution,
) -> list[ReviewResult]:
    """Accept each sequence's draft tokens up to the first that did not pass."""
    results, first = [], 0
    for request in requests:
        accepted = 0
        while accepted < len(request.tokens) and passed[first + accepted]:
            accepted += 1
        rows = range(first, first + accepted + 1)
        draft_probs = [
            SparseDistribution(q.ids[row : row + 1], q.probs[row : row + 1]) for row in rows
        ]
        results.append(ReviewResult(accepted, corrections[rows[-1]], draft_probs))
        first += len(request.tokens) + 1
    return results


def _accept_equal(own: list[int], requests: Sequence[ReviewRequest]) -> list[ReviewResult]:
    """Accept draft tokens while they equal this stage's own. Their q is not used then."""
    return [
        ReviewResult(accepted, token, [None] * (accepted + 1))
        for accepted, token in verify_greedy(own, [request.tokens for request in requests])
    ]


def _probs_at(wanted: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """Return the probabilities of wanted ids: [rows, n], on [rows, support] -> [rows, n].

    Padding has probability 0, whatever its id.
    """
    return torch.where(wanted[:, :, None] == ids[:, None, :], probs[:, None, :], 0).sum(-1)


def _draft_rows(requests: Sequence[ReviewRequest]) -> tuple[Tensor, Tensor, Tensor]:
    """Return draft tokens, ids and q by row; the row after a sequence's last token has zeros."""
    tokens = np.array([token for request in requests for token in request.tokens], dtype=np.int64)
    ids, probs = supports(
        tokens,
        np.ones(len(tokens), np.int64),
        [probs for request in requests for probs in request.draft_probs],
    )
    counts = np.array([len(request.tokens) for request in requests])
    rows = np.arange(len(tokens)) + np.repeat(np.arange(len(requests)), counts)
    num_rows = len(tokens) + len(requests)
    return (
        _spread(tokens, rows, num_rows),
        _spread(ids, rows, num_rows),
        _spread(probs, rows, num_rows),
    )


def _spread(part: NDArray[Any], rows: NDArray[np.int64], num_rows: int) -> Tensor:
    whole = np.zeros((num_rows, *part.shape[1:]), part.dtype)
    whole[rows] = part
    return torch.from_numpy(whole)


def _top_support(
    logits: Tensor, requests: Sequence[ReviewRequest], support: int
) -> tuple[Tensor, Tensor]:
    return top_support(
        logits,
        _warps(requests),
        support,
        ignores_ids=ignore_ids([request.policy.warp for request in requests]),
    )


def _warps(requests: Sequence[ReviewRequest]) -> WarpBatch:
    return WarpBatch(
        [request.policy.warp for request in requests],
        [len(request.tokens) + 1 for request in requests],
        [request.history for request in requests],
    )


def _keys(
    requests: Sequence[ReviewRequest], purpose: Purpose, device: torch.device
) -> Tensor:  # [rows, 2]
    counts = [len(request.tokens) + 1 for request in requests]
    rounds = np.repeat([request.position for request in requests], counts)
    positions = np.concatenate(
        [
            np.arange(request.position, request.position + count)
            for request, count in zip(requests, counts, strict=True)
        ]
    )
    return row_keys(
        np.repeat(seed_array([request.policy.seed for request in requests]), counts),
        rounds,
        positions,
        purpose,
        device=device,
    )
