"""Chi-square of counts, a score test in one direction, and acceptance beside its expectation.

It knows neither engines nor models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from tests.support.exact_distribution import Floats, Ints

MIN_EXPECTED = 8.0  # expected samples in a cell


@dataclass(slots=True)
class Fit:
    """Chi-square of counts against exact distributions; independent samples' add up."""

    chi2: float = 0.0
    dof: int = 0

    @property
    def p_value(self) -> float:
        if not np.isfinite(self.chi2):
            return 0.0
        return float(stats.chi2.sf(self.chi2, self.dof)) if self.dof else 1.0

    def add(self, counts: Ints, joint: Floats) -> None:
        """Add counts of continuations with joint probabilities `joint`.

        A count of an impossible continuation makes chi-square infinite.
        """
        if counts[joint == 0].any():
            self.chi2 = np.inf
            return
        expected = joint * counts.sum()
        cells = _cells(expected)
        wanted, found = np.bincount(cells, expected), np.bincount(cells, counts)
        self.chi2 += float(((found - wanted) ** 2 / wanted).sum())
        self.dof += len(wanted) - 1


def _cells(expected: Floats) -> Ints:
    """Return the cell of each continuation.

    Neighbours in lexicographic order, which share a prefix, share a cell until it is full.
    """
    cells, cell, filled = np.zeros(len(expected), dtype=np.int64), 0, 0.0
    for i, samples in enumerate(expected.tolist()):
        cells[i] = cell
        filled += samples
        if filled >= MIN_EXPECTED:
            cell, filled = cell + 1, 0.0
    return np.minimum(cells, max(cell - 1, 0))  # what does not fill a cell joins the last


@dataclass(slots=True)
class ScoreTest:
    """Sum of a score over samples beside its exact mean and variance; independent samples add up.

    Where chi-square looks in all directions, a score looks in one, and sees smaller deviations.
    """

    found: float = 0.0
    expected: float = 0.0
    variance: float = 0.0

    @property
    def num_standard_errors(self) -> float:
        return (self.found - self.expected) / self.variance**0.5 if self.variance else 0.0

    @property
    def p_value(self) -> float:
        """Probability of a deviation as large, in either direction."""
        return float(2 * stats.norm.sf(abs(self.num_standard_errors)))

    def add(self, counts: Ints, joint: Floats, score: Floats) -> None:
        """Add counts of continuations, each with its probability and its score."""
        samples = counts.sum()
        mean = joint @ score
        self.found += float(counts @ score)
        self.expected += float(samples * mean)
        self.variance += float(samples * (joint @ (score - mean) ** 2))


@dataclass(slots=True)
class Acceptance:
    """Acceptance of the first draft token of each round, measured and expected."""

    rounds: int = 0
    accepted: int = 0
    expected: float = 0.0
    variance: float = 0.0

    def add(self, accepted: NDArray[np.bool_], beta: Floats) -> None:
        """Add the outcomes of some rounds, and their probabilities given the prefixes."""
        self.rounds += len(beta)
        self.accepted += int(accepted.sum())
        self.expected += float(beta.sum())
        self.variance += float((beta * (1 - beta)).sum())

    def merge(self, other: Acceptance) -> None:
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
        return float(self.variance**0.5) / self.rounds

    @property
    def num_standard_errors(self) -> float:
        """Difference of measured and expected acceptance in standard errors.

        In a few rounds every outcome may be certain, so that there is no error.
        """
        difference = self.measured_alpha - self.expected_alpha
        if not self.standard_error:
            return difference and math.copysign(math.inf, difference)
        return difference / self.standard_error
