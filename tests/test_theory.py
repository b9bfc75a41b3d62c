"""The formulas against published tables and against simulated rounds."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from specserve import theory

SMALL, BASE = 77 / 11300, 250 / 11300  # parameters against the 11.3B target of 2312.11462, Table 1
ROUNDS = 400_000


def accepted(
    rng: np.random.Generator, alpha: float, gamma: int, rounds: int = ROUNDS
) -> NDArray[np.int64]:
    """Return the draft tokens accepted in each of many simulated rounds."""
    counts: NDArray[np.int64] = np.minimum(rng.geometric(1 - alpha, rounds) - 1, gamma)
    return counts


@pytest.mark.parametrize(
    ("alphas", "costs", "published"),
    [
        ([0.65] * 9, [SMALL] * 9, 2.65),
        ([0.73] * 8, [BASE] * 8, 2.96),
        ([0.73] * 5 + [0.65] * 3, [BASE] * 5 + [SMALL] * 3, 3.03),
        ([0.75] * 12, [SMALL] * 12, 3.61),
        ([0.80] * 11, [BASE] * 11, 3.75),
        ([0.80] * 5 + [0.75] * 8, [BASE] * 5 + [SMALL] * 8, 3.93),
    ],
)
def test_table_1_of_the_cascade_paper_is_reproduced(
    alphas: list[float], costs: list[float], published: float
) -> None:
    assert theory.horizontal_factor(alphas, costs) == pytest.approx(published, abs=0.01)
    if len(set(alphas)) == 1:
        assert theory.walltime_factor(alphas[0], len(alphas), costs[0]) == pytest.approx(
            published, abs=0.01
        )


@pytest.mark.parametrize(("alpha", "gamma"), [(0.0, 3), (0.5, 1), (0.8, 7), (0.95, 16)])
def test_tokens_per_round_is_the_mean_of_simulated_rounds(alpha: float, gamma: int) -> None:
    tokens = accepted(np.random.default_rng(1), alpha, gamma) + 1
    assert tokens.mean() == pytest.approx(
        theory.tokens_per_round(alpha, gamma), abs=5 * tokens.std() / ROUNDS**0.5 + 1e-12
    )


def test_walltime_with_hidden_drafting_agrees_with_simulated_rounds() -> None:
    alpha, gamma, c, hit_rate = 0.8, 5, 0.1, 0.6
    rng = np.random.default_rng(2)
    tokens = accepted(rng, alpha, gamma).sum() + ROUNDS
    seconds = ROUNDS + gamma * c * (rng.random(ROUNDS) >= hit_rate).sum()
    assert tokens / seconds == pytest.approx(
        theory.walltime_factor(alpha, gamma, c, hit_rate=hit_rate), rel=0.005
    )


def test_hidden_drafting_at_full_hit_rate_costs_nothing() -> None:
    assert theory.walltime_factor(0.7, 6, 0.3, hit_rate=1.0) == theory.tokens_per_round(0.7, 6)


def test_arithmetic_factor_counts_rejected_tokens() -> None:
    alpha, gamma, c_ops = 0.6, 4, 0.05
    tokens = accepted(np.random.default_rng(3), alpha, gamma).sum() + ROUNDS
    operations = ROUNDS * (gamma * c_ops + gamma + 1)
    assert operations / tokens == pytest.approx(
        theory.arithmetic_factor(alpha, gamma, c_ops), rel=0.005
    )


def test_acceptance_is_one_minus_total_variation() -> None:
    rng = np.random.default_rng(4)
    p, q = rng.dirichlet(np.ones(6), size=(2, 20))
    expected = 1 - np.abs(p - q).sum(-1).mean() / 2
    assert theory.acceptance(p.tolist(), q.tolist()) == pytest.approx(expected, abs=1e-12)


def test_a_gain_is_possible_exactly_where_alpha_exceeds_c() -> None:
    for alpha in np.linspace(0, 0.99, 34):
        for c in np.linspace(0.001, 1.2, 34):
            best = max(theory.walltime_factor(alpha, gamma, c) for gamma in range(17))
            assert (best > 1 + 1e-12) == (alpha > c)
            if alpha > c:
                assert best >= (1 + alpha) / (1 + c) - 1e-12, "2211.17192, Corollary 3.9"


@pytest.mark.parametrize(
    ("alpha", "c", "best"),
    [(0.1, 0.5, 0), (0.5, 0.5, 0), (0.0, 0.0, 0), (1.0, 0.1, 16), (0.8, 0.1, 6), (0.75, 0.01, 11)],
)
def test_best_gamma_is_the_peak_of_theorem_3_8(alpha: float, c: float, best: int) -> None:
    assert theory.best_gamma(alpha, c, 16) == best


def test_best_gamma_grows_when_drafting_is_hidden() -> None:
    assert theory.best_gamma(0.8, 0.2, 16, hit_rate=0.9) > theory.best_gamma(0.8, 0.2, 16)


@pytest.mark.parametrize("x", [0.0, 0.3, 0.9, 1.0])
def test_phi_is_the_generating_function_of_a_round(x: float) -> None:
    tokens = accepted(np.random.default_rng(5), 0.6, 4) + 1
    assert (x**tokens).mean() == pytest.approx(theory.phi(x, 0.6, 4), abs=0.003)


@pytest.mark.parametrize("alpha", [0.8, 1.0])
def test_vertical_cascade_agrees_with_simulated_rounds(alpha: float) -> None:
    inner_alpha, n, k, c1, c2 = 0.6, 3, 4, 0.1, 0.01
    rng = np.random.default_rng(6)
    drafted = np.sum([accepted(rng, inner_alpha, k) + 1 for _ in range(n)], axis=0)
    tokens = (
        np.minimum(rng.geometric(1 - alpha, ROUNDS) - 1, drafted) if alpha < 1 else drafted
    ) + 1
    measured = tokens.mean() / (1 + n * c1 + n * k * c2)
    assert measured == pytest.approx(
        theory.vertical_factor(alpha, inner_alpha, n=n, k=k, c1=c1, c2=c2), rel=0.005
    )


def test_vertical_cascade_without_inner_drafts_is_plain_speculation() -> None:
    assert theory.vertical_factor(0.7, 0.5, n=4, k=0, c1=0.1, c2=0.3) == pytest.approx(
        theory.walltime_factor(0.7, 4, 0.1), abs=1e-12
    )


def test_horizontal_cascade_agrees_with_simulated_rounds() -> None:
    alphas, costs = [0.9, 0.8, 0.5, 0.3], [0.2, 0.1, 0.01, 0.0]
    passed = np.random.default_rng(7).random((ROUNDS, 4)) < alphas
    tokens = passed.cumprod(1).sum(1).mean() + 1
    assert tokens / 1.31 == pytest.approx(theory.horizontal_factor(alphas, costs), rel=0.005)


def test_swi_of_one_drafter_is_theorem_3_8() -> None:
    alpha, gamma, c = 0.75, 5, 0.08
    tokens = int(accepted(np.random.default_rng(8), alpha, gamma).sum()) + ROUNDS
    swi = theory.standardized_walltime_improvement(tokens, ROUNDS, [ROUNDS * gamma], [c])
    assert swi == pytest.approx(theory.walltime_factor(alpha, gamma, c), rel=0.005)
