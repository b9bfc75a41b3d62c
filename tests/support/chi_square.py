"""Measured beside expected: chi-square of counts, and the acceptance of draft tokens. Knows neither engines nor models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from tests.support.exact_distribution import Floats, Ints

AT_LEAST = 8.0  # expected samples in a cell


@dataclass(slots=True)
class Fit:
    """Chi-square of counts against exact distributions; those of independent samples add up."""

    chi2: float = 0.0
    dof: int = 0

    @property
    def p_value(self) -> float:
        if not np.isfinite(self.chi2):
            return 0.0
        return float(stats.chi2.sf(self.chi2, self.dof)) if self.dof else 1.0

    def add(self, counts: Ints, joint: Floats) -> None:
        """A count where nothing may be is infinitely far off."""
        if counts[joint == 0].any():
            self.chi2 = np.inf
            return
        expected = joint * counts.sum()
        cells = _cells(expected)
        there, here = np.bincount(cells, expected), np.bincount(cells, counts)
        self.chi2 += float(((here - there) ** 2 / there).sum())
        self.dof += len(there) - 1


def _cells(expected: Floats) -> Ints:
    """The cell of each continuation. Neighbours in lexicographic order, which have a prefix in common, share one until it is full."""
    cells, cell, filled = np.zeros(len(expected), dtype=np.int64), 0, 0.0
    for i, samples in enumerate(expected.tolist()):
        cells[i] = cell
        filled += samples
        if filled >= AT_LEAST:
            cell, filled = cell + 1, 0.0
    return np.minimum(cells, max(cell - 1, 0))  # what does not fill a cell joins the last


@dataclass(slots=True)
class Acceptance:
    """Of the first draft token of each round: how often it was accepted, and how often it should have been."""

    rounds: int = 0
    accepted: int = 0
    expected: float = 0.0
    variance: float = 0.0

    def add(self, accepted: NDArray[np.bool_], beta: Floats) -> None:
        """For some rounds, the outcomes and their probabilities given the prefixes."""
        self.rounds += len(beta)
        self.accepted += int(accepted.sum())
        self.expected += float(beta.sum())
        self.variance += float((beta * (1 - beta)).sum())

    def include(self, other: Acceptance) -> None:
        self.rounds, self.accepted = self.rounds + other.rounds, self.accepted + other.accepted
        self.expected, self.variance = (
            self.expected + other.expected,
            self.variance + other.variance,
        )

    @property
    def measured_alpha(self) -> float:
        return self.accepted / self.rounds

    @property
    def expected_alpha(self) -> float:
        return self.expected / self.rounds

    @property
    def standard_error(self) -> float:
        return self.variance**0.5 / self.rounds

    @property
    def errors_off(self) -> float:
        """How many standard errors lie between the two."""
        return (self.measured_alpha - self.expected_alpha) / self.standard_error
