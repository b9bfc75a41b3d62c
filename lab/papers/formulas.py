"""Table 1 of arXiv 2312.11462 and Figures 2 to 4 of arXiv 2211.17192, by formula."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lab.papers.page import Section, table
from lab.papers.published import (
    TABLE_1,
    TARGET,
    TRADE_OFFS,
    PaperSetup,
    PaperTradeOff,
)
from specserve.theory import (
    arithmetic_factor,
    best_gamma,
    horizontal_factor,
    tokens_per_round,
    walltime_factor,
)
from specserve.tools.plan.curves import Curve, Panel

ALPHAS = [i / 100 for i in range(100)]
MAX_GAMMA = 64
"""Largest gamma that the search for the best one considers."""
GAMMAS = (1, 3, 5, 7, 10)
COSTS = (0.01, 0.02, 0.05, 0.1)


def factor(setup: PaperSetup) -> float:
    """Return the factor of a horizontal cascade; with one draft, Theorem 3.8 of 2211.17192."""
    alphas = [alpha for _, positions, alpha, _ in setup.drafts for _ in range(positions)]
    costs = [
        parameters / TARGET
        for _, positions, _, parameters in setup.drafts
        for _ in range(positions)
    ]
    return horizontal_factor(alphas, costs)


def table_1() -> Section:
    rows = []
    for setup in TABLE_1:
        drafts = " + ".join(f"{name} x {positions}" for name, positions, _, _ in setup.drafts)
        alphas = ", ".join(f"{alpha:.2f}" for _, _, alpha, _ in setup.drafts)
        rows.append((setup.task, drafts, alphas, f"{factor(setup):.3f}", f"{setup.factor:.2f}"))
    text = (
        "Expected walltime factors of drafts and horizontal cascades; c is the ratio of the "
        "parameters, to those of a target of 11.3B.\n\n"
    )
    return Section(
        "Table 1 of 2312.11462, by formula",
        text + table(("task", "drafts", "alpha", "ours", "published"), rows),
    )


def figures() -> Section:
    """Return the curves, with Table 1 of the paper, whose figures lie on them."""
    best = ", ".join(f"{best_gamma(0.8, c, MAX_GAMMA)} (c = {c})" for c in COSTS)
    rows = [
        (
            f"{row.alpha}",
            str(row.gamma),
            f"{operations(row):.3f}",
            f"{row.operations:.2f}",
            f"{speed(row):.3f}",
            f"{row.speed:.2f}",
        )
        for row in TRADE_OFFS
    ]
    text = "\n\n".join(
        (
            "The papers print the curves without numbers; Table 1 of the same paper has some of "
            "them, for c = c_ops = 0.",
            table(
                ("alpha", "gamma", "operations, ours", "published", "speed, ours", "published"),
                rows,
            ),
            f"The best gamma at alpha 0.8: {best}.",
        )
    )
    tokens = [_curve(f"gamma {gamma}", partial(tokens_per_round, gamma=gamma)) for gamma in GAMMAS]
    best_curves = [_curve(f"c = {c}", partial(best_gamma, c=c, max_gamma=MAX_GAMMA)) for c in COSTS]
    panels = [
        Panel("Figure 2: tokens a round", "alpha", "expected tokens", tokens),
        Panel("Figure 3: the best gamma", "alpha", "gamma", best_curves, steps=True),
    ]
    return Section(
        "Figures 2 to 4 of 2211.17192, by formula",
        text,
        {"figures-2-3": panels, "figure-4": _figure_4()},
    )


def operations(row: PaperTradeOff) -> float:
    return arithmetic_factor(row.alpha, row.gamma, 0.0)


def speed(row: PaperTradeOff) -> float:
    return walltime_factor(row.alpha, row.gamma, 0.0)


def _figure_4() -> list[Panel]:
    faster = [
        _curve(f"gamma {gamma}", partial(walltime_factor, gamma=gamma, c=0.0)) for gamma in GAMMAS
    ]
    more = [
        _curve(f"gamma {gamma}", partial(arithmetic_factor, gamma=gamma, c_ops=0.0))
        for gamma in GAMMAS
    ]
    return [
        Panel("Figure 4: speed, c = 0", "alpha", "times faster than plain decoding", faster),
        Panel("Figure 4: operations, c_ops = 0", "alpha", "times those of plain decoding", more),
    ]


def _curve(name: str, of_alpha: Callable[[float], float]) -> Curve:
    return Curve(name, ALPHAS, [of_alpha(alpha) for alpha in ALPHAS])
