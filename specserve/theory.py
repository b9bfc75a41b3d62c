"""The papers' formulas for what speculation gains. Knows nothing of the engine.

Letters: alpha = acceptance rate, the chance that a draft token is accepted, gamma = draft length,
c = time of one draft pass / time of one target pass.
Papers: 2211.17192 (speculative decoding), 2312.11462 (cascade speculative drafting).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul


def acceptance(p: Sequence[Sequence[float]], q: Sequence[Sequence[float]]) -> float:
    """Return alpha = E[sum_x min(p, q)] over positions (2211.17192, Corollary 3.6)."""
    betas = [sum(map(min, p_row, q_row)) for p_row, q_row in zip(p, q, strict=True)]
    return math.fsum(betas) / len(betas)


def tokens_per_round(alpha: float, gamma: int) -> float:
    """Return the expected tokens that a round commits (2211.17192, Equation 1).

    It is (1 - alpha^(gamma+1)) / (1 - alpha).
    """
    if alpha == 1:
        return float(gamma + 1)
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def walltime_factor(alpha: float, gamma: int, c: float, *, hit_rate: float = 0.0) -> float:
    """Return how many times faster than plain decoding it is (2211.17192, Theorem 3.8).

    A share `hit_rate` of the proposals is prepared while the target verifies and takes no time:
    (1 - h) gamma c instead of gamma c.
    """
    return tokens_per_round(alpha, gamma) / ((1 - hit_rate) * gamma * c + 1)


def arithmetic_factor(alpha: float, gamma: int, c_ops: float) -> float:
    """Return how many times the arithmetic of plain decoding it takes (2211.17192, Theorem 3.11).

    c_ops = operations of draft / target for a token.
    """
    return (gamma * c_ops + gamma + 1) / tokens_per_round(alpha, gamma)


def best_gamma(alpha: float, c: float, max_gamma: int, *, hit_rate: float = 0.0) -> int:
    """Return the draft length with the greatest walltime factor, the shortest of equals.

    It is 0 where drafting does not pay.
    """
    return max(
        range(max_gamma + 1), key=lambda gamma: walltime_factor(alpha, gamma, c, hit_rate=hit_rate)
    )


def phi(x: float, alpha: float, k: int) -> float:
    """Return the generating function of the tokens of one round, E[x^tokens] (2312.11462).

    alpha is the acceptance, k the draft length. The geometric sum over alpha x has the form of
    `tokens_per_round`.
    """
    return 1 + (x - 1) * tokens_per_round(alpha * x, k)


def vertical_factor(
    alpha: float, inner_alpha: float, *, n: int, k: int, c1: float, c2: float
) -> float:
    """Return the walltime factor of a vertical cascade (2312.11462).

    The draft itself decodes by speculation before the target verifies. The target accepts the
    draft's tokens with alpha; the draft (cost c1) reviews n times k tokens of a smaller one
    (cost c2), of which it accepts inner_alpha.
    """
    cost = 1 + n * c1 + n * k * c2
    if alpha == 1:
        return (1 + n * tokens_per_round(inner_alpha, k)) / cost
    drafted: float = phi(alpha, inner_alpha, k) ** n  # E[alpha^drafted]
    return (1 - alpha * drafted) / ((1 - alpha) * cost)


def horizontal_factor(alphas: Sequence[float], costs: Sequence[float]) -> float:
    """Return the walltime factor of a horizontal cascade (2312.11462).

    Draft position i comes from a drafter with alphas[i] and costs[i].
    """
    assert len(alphas) == len(costs)
    tokens: float = sum(accumulate(alphas, mul, initial=1.0))
    return tokens / (1 + sum(costs))


def standardized_walltime_improvement(
    tokens: int, target_passes: int, passes: Sequence[int], costs: Sequence[float]
) -> float:
    """Return the SWI: tokens a unit of time (2312.11462).

    A target pass takes 1, a pass of drafter i takes costs[i].
    """
    drafting: float = sum(map(mul, passes, costs))
    return tokens / (target_passes + drafting)
