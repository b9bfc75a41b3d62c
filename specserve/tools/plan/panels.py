"""Panels of a plan's plot: how much faster each pair is, by gamma and by alpha.

Knows no files and no matplotlib.
"""

from __future__ import annotations

from specserve.theory import walltime_factor
from specserve.tools.plan.curves import Curve, Panel
from specserve.tools.plan.gains import GammaAdvice


def panels(advice: tuple[GammaAdvice, ...]) -> list[Panel]:
    """Return the factor by gamma for each pair, and the factor of the best gamma by alpha."""
    first = advice[0]
    return [
        Panel(
            f"by gamma, c = {first.pair.c:.3g}",
            "gamma",
            "times faster than plain decoding",
            _curves_by_gamma(advice),
            counts_across=True,
        ),
        Panel(
            f"the best gamma up to {len(first.by_gamma) - 1}, c = {first.pair.c:.3g}",
            "alpha",
            "times faster than plain decoding",
            _curves_by_alpha(first),
        ),
    ]


def _curves_by_gamma(advice: tuple[GammaAdvice, ...]) -> list[Curve]:
    curves = []
    for colour, one in enumerate(advice):
        name = f"{one.pair.name}, alpha {one.pair.alpha:.2f}"
        gammas = [gain.gamma for gain in one.by_gamma]
        serial = [gain.serial for gain in one.by_gamma]
        hidden = [gain.hidden for gain in one.by_gamma]
        curves += [
            Curve(name, gammas, serial, colour=colour),
            Curve(f"{one.hit_rate:.0%} hidden", gammas, hidden, dashed=True, colour=colour),
        ]
    return curves


def _curves_by_alpha(advice: GammaAdvice) -> list[Curve]:
    curves, alphas = [], [i / 100 for i in range(100)]
    for name, hit_rate in (
        ("drafting serial", 0.0),
        (f"{advice.hit_rate:.0%} hidden", advice.hit_rate),
    ):
        best = [
            max(
                walltime_factor(alpha, gamma, advice.pair.c, hit_rate=hit_rate)
                for gamma in range(len(advice.by_gamma))
            )
            for alpha in alphas
        ]
        curves.append(Curve(name, alphas, best, dashed=hit_rate > 0, colour=0))
    return curves
