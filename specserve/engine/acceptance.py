"""How many draft tokens are accepted, lately: by their place in the proposal, and by sequence. Counts only; knows no seconds."""

from __future__ import annotations

from collections import abc

import numpy as np
from numpy.typing import NDArray

from specserve.engine.batch import Outcome

Reals = NDArray[np.float64]

_HOPED = 0.7  # before anything is measured
_DECAY = 0.98  # of what was seen, a round; a memory of some 50 rounds
_OWN_DECAY = 0.95
_WEIGHT = 20.0  # judged drafts that it takes for a place, or a sequence, to be believed rather than the mean of all


class Acceptance:
    """Forgets slowly, and only while it sees anything."""

    def __init__(self, max_gamma: int) -> None:
        self._reached: Reals = np.zeros(max_gamma)  # [place]
        self._passed: Reals = np.zeros(max_gamma)
        self._trials, self._hits = 10.0, 10.0 * _HOPED
        self._own: dict[int, tuple[float, float]] = {}  # of a sequence: judged, accepted

    @property
    def alpha(self) -> float:
        """The share of judged draft tokens that were accepted."""
        return self._hits / self._trials

    @property
    def profile(self) -> Reals:  # [place]
        """How likely a draft at each place is accepted if the one before it was."""
        profile: Reals = (self._passed + _WEIGHT * self.alpha) / (self._reached + _WEIGHT)
        return profile

    def observe(self, outcomes: abc.Sequence[Outcome]) -> None:
        """Of one round."""
        if not outcomes:
            return
        self._reached = _DECAY * self._reached + self._above(
            [outcome.judged for outcome in outcomes]
        )
        self._passed = _DECAY * self._passed + self._above(
            [outcome.accepted for outcome in outcomes]
        )
        self._trials = _DECAY * self._trials + sum(outcome.judged for outcome in outcomes)
        self._hits = _DECAY * self._hits + sum(outcome.accepted for outcome in outcomes)
        for outcome in outcomes:
            judged, accepted = self._own.get(outcome.seq_id, (0.0, 0.0))
            self._own[outcome.seq_id] = (
                _OWN_DECAY * judged + outcome.judged,
                _OWN_DECAY * accepted + outcome.accepted,
            )

    def reaches(self, seq_ids: abc.Sequence[int]) -> Reals:  # [seqs, place]
        """How likely the drafts of each sequence are accepted up to each place."""
        alpha = self.alpha
        own = np.array([self._own.get(seq_id, (0.0, 0.0)) for seq_id in seq_ids]).reshape(-1, 2)
        ratios = (own[:, 1:] + _WEIGHT * alpha) / (own[:, :1] + _WEIGHT) / alpha
        chances: Reals = np.minimum(ratios * self.profile, 0.999)
        return chances.cumprod(axis=1)

    def _above(self, counts: abc.Sequence[int]) -> Reals:  # [place]
        """How many of the counts lie above each place."""
        above: Reals = (
            np.greater(counts, np.arange(len(self._reached))[:, None]).sum(1).astype(float)
        )
        return above

    def keep(self, seq_ids: abc.Iterable[int]) -> None:
        """Forgets all sequences but these."""
        self._own = {seq_id: self._own[seq_id] for seq_id in seq_ids if seq_id in self._own}
