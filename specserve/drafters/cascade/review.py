"""A larger drafter looks at what a smaller one guessed: rule 1, and the law that each token which then stands was really drawn from.

docs/cascades.md says why. Knows no models and no texts; everything lies on the reviewer's own support.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.drafters.cascade.sequence import Law
from specserve.drafters.neural.draws import COUPLED_SUPPORT, are_plain, likeliest
from specserve.drafters.ranking import mode
from specserve.sampling.distribution import History, WarpBatch, sample
from specserve.sampling.drafts import supports
from specserve.sampling.noise import Purpose, exponential, row_keys, seed_array, uniform
from specserve.sampling.verify import agree
from specserve.types import Policy, SparseRows


@dataclass(frozen=True, slots=True)
class Guesses:
    """Of one sequence: tokens that may stand from `position` on, and their laws. The policy's seed is the reviewer's own."""

    position: int
    tokens: Sequence[int]
    laws: Sequence[Law]
    policy: Policy
    history: History | None = None  # where there are penalties


@dataclass(frozen=True, slots=True)
class Opinion:
    """So many guesses stand, then comes `next_token`; and the laws of all of these, whoever thought of them."""

    accepted: int
    next_token: int
    laws: Sequence[Law]


def review(
    logits: Tensor, guesses: Sequence[Guesses], *, support: int, lenience: float
) -> list[Opinion]:
    """logits [rows, vocab]: a row for each guess of a sequence and one more. Each sequence under its own policy."""
    modes = [mode(one.policy) for one in guesses]
    if len(set(modes)) == 1:
        return RULES[modes[0]](logits, guesses, support, lenience)
    stops = np.cumsum([len(one.tokens) + 1 for one in guesses])
    opinions: dict[int, Opinion] = {}
    for name in sorted(set(modes)):
        own = [i for i, found in enumerate(modes) if found == name]
        rows = np.concatenate(
            [np.arange(stops[i] - len(guesses[i].tokens) - 1, stops[i]) for i in own]
        )
        part = RULES[name](
            logits[torch.from_numpy(rows).to(logits.device)],
            [guesses[i] for i in own],
            support,
            lenience,
        )
        opinions |= dict(zip(own, part, strict=True))
    return [opinions[i] for i in range(len(guesses))]


def _greedy(
    logits: Tensor, guesses: Sequence[Guesses], support: int, lenience: float
) -> list[Opinion]:
    return _agreed(_warps(guesses).greedy_tokens(logits).tolist(), guesses)


def _coupled(
    logits: Tensor, guesses: Sequence[Guesses], support: int, lenience: float
) -> list[Opinion]:
    """The reviewer's own draw, with the noise that the target will use."""
    ids, probs = _likeliest(logits, guesses, COUPLED_SUPPORT)
    own = sample(probs, exponential(_keys(guesses, Purpose.COUPLED, logits.device), ids))
    return _agreed(ids.gather(1, own[:, None])[:, 0].tolist(), guesses)


def _sampled(
    logits: Tensor, guesses: Sequence[Guesses], support: int, lenience: float
) -> list[Opinion]:
    """Rule 1, with l between drafters: accept while u < l q1/q2, else draw from max(0, q1 - q2). Behind the last guess q2 is 0."""
    ids, q1 = _likeliest(logits, guesses, support)
    tokens, ids2, probs2 = (
        part.to(ids.device) for part in _guessed(guesses)
    )  # [rows], [rows, support of the guesses] twice
    own, theirs = (
        _at(tokens[:, None], ids, q1)[:, 0],
        _at(tokens[:, None], ids2, probs2)[:, 0],
    )  # q1 and q2 of each guess
    passed = uniform(_keys(guesses, Purpose.ACCEPT, ids.device)) * theirs < lenience * own
    q2 = _at(ids, ids2, probs2)  # on the reviewer's support
    left = (q1 - q2).clamp_(min=0)
    left = torch.where(
        left.sum(-1, keepdim=True) > 0, left, q1
    )  # equal but for rounding: nothing is refused
    corrections = ids.gather(
        1, sample(left, exponential(_keys(guesses, Purpose.NEXT, ids.device), ids))[:, None]
    )[:, 0]
    law = q1 if lenience == 1 else _law(q1, q2, left, lenience)
    return _opinions(
        guesses,
        passed.tolist(),
        corrections.tolist(),
        SparseRows(ids.cpu().numpy(), law.cpu().numpy()),
    )


RULES: dict[str, Callable[[Tensor, Sequence[Guesses], int, float], list[Opinion]]] = {
    "greedy": _greedy,
    "coupled": _coupled,
    "sampled": _sampled,
}


def _law(q1: Tensor, q2: Tensor, left: Tensor, lenience: float) -> Tensor:
    """What stands is a guess, with min(q2, l q1), or else a correction. With l = 1 this is q1."""
    kept = torch.minimum(q2, lenience * q1)
    return kept + (1 - kept.sum(-1, keepdim=True)).clamp_(min=0) * left / left.sum(-1, keepdim=True)


def _opinions(
    guesses: Sequence[Guesses], passed: list[bool], corrections: list[int], laws: SparseRows
) -> list[Opinion]:
    found, first = [], 0
    for one in guesses:
        accepted = 0
        while accepted < len(one.tokens) and passed[first + accepted]:
            accepted += 1
        rows = range(first, first + accepted + 1)
        own = [SparseRows(laws.ids[row : row + 1], laws.probs[row : row + 1]) for row in rows]
        found.append(Opinion(accepted, corrections[rows[-1]], own))
        first += len(one.tokens) + 1
    return found


def _agreed(own: list[int], guesses: Sequence[Guesses]) -> list[Opinion]:
    """Guesses stand while they are the reviewer's own tokens. Nobody asks for laws then."""
    return [
        Opinion(stand, token, [None] * (stand + 1))
        for stand, token in agree(own, [one.tokens for one in guesses])
    ]


def _at(wanted: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """What rows give to some ids: [rows, n], on [rows, support] -> [rows, n]. Padding has probability 0, whatever its id."""
    return torch.where(wanted[:, :, None] == ids[:, None, :], probs[:, None, :], 0).sum(-1)


def _guessed(guesses: Sequence[Guesses]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and laws by row; the row behind the last guess has none."""
    tokens = np.array([token for one in guesses for token in one.tokens], dtype=np.int64)
    ids, probs = supports(
        tokens, np.ones(len(tokens), np.int64), [law for one in guesses for law in one.laws]
    )
    counts = np.array([len(one.tokens) for one in guesses])
    rows = np.arange(len(tokens)) + np.repeat(np.arange(len(guesses)), counts)
    num_rows = len(tokens) + len(guesses)
    return (
        _spread(tokens, rows, num_rows),
        _spread(ids, rows, num_rows),
        _spread(probs, rows, num_rows),
    )


def _spread(part: NDArray[Any], rows: NDArray[np.int64], num_rows: int) -> Tensor:
    whole = np.zeros((num_rows, *part.shape[1:]), part.dtype)
    whole[rows] = part
    return torch.from_numpy(whole)


def _likeliest(logits: Tensor, guesses: Sequence[Guesses], support: int) -> tuple[Tensor, Tensor]:
    return likeliest(
        logits, _warps(guesses), support, plain=are_plain([one.policy.warp for one in guesses])
    )


def _warps(guesses: Sequence[Guesses]) -> WarpBatch:
    return WarpBatch(
        [one.policy.warp for one in guesses],
        [len(one.tokens) + 1 for one in guesses],
        [one.history for one in guesses],
    )


def _keys(
    guesses: Sequence[Guesses], purpose: Purpose, device: torch.device
) -> Tensor:  # [rows, 2]
    counts = [len(one.tokens) + 1 for one in guesses]
    begun = np.repeat([one.position for one in guesses], counts)
    places = np.concatenate(
        [
            np.arange(one.position, one.position + count)
            for one, count in zip(guesses, counts, strict=True)
        ]
    )
    return row_keys(
        np.repeat(seed_array([one.policy.seed for one in guesses]), counts),
        begun,
        places,
        purpose,
        device=device,
    )
