"""How many tokens are worth drafting. Knows measured acceptance and seconds; knows neither pages nor limits, which the scheduler applies."""

from __future__ import annotations

from collections import abc

from specserve.engine.batch import Batch
from specserve.engine.sequence import Sequence
from specserve.theory import best_gamma
from specserve.types import Verdict

_HOPED_ALPHA, _HOPED_COST = 0.7, 0.1  # before anything is measured
_DECAY = 0.98  # of what acceptance was seen, a round; a memory of some 50 rounds
_BLEND = 0.1  # of the newest seconds into their running mean
_PROBE_EVERY, _PROBE_ROUNDS = 64, 4  # while drafting does not pay, the last few of so many rounds try again


class Pacer:
    """With `gamma` None it chooses gamma by itself, the same for all; a request's own wish always wins."""

    def __init__(self, gamma: int | None, *, max_gamma: int) -> None:
        self._fixed = gamma
        self._max_gamma = max_gamma
        self._trials = 10.0
        self._hits = _HOPED_ALPHA * self._trials
        self._pass_seconds: float | None = None
        self._verify_seconds: float | None = None
        self._resting = 0  # rounds since drafting last paid
        self._best = best_gamma(self.alpha, self.cost, max_gamma)

    @property
    def alpha(self) -> float:
        """The share of judged draft tokens that were accepted, lately."""
        return self._hits / self._trials

    @property
    def cost(self) -> float:
        """c: the seconds of one drafted position over those of one verification."""
        if self._pass_seconds is None or not self._verify_seconds:
            return _HOPED_COST
        return self._pass_seconds / self._verify_seconds

    @property
    def gamma(self) -> int:
        """What a request without a wish of its own gets."""
        if self._fixed is not None:
            return self._fixed
        if self._best == 0 and self._resting % _PROBE_EVERY >= _PROBE_EVERY - _PROBE_ROUNDS:
            return min(1, self._max_gamma)
        return self._best

    def choose(self, sequences: abc.Sequence[Sequence]) -> list[int]:
        """A gamma for each sequence; 0 is a choice."""
        usual = self.gamma
        return [usual if sequence.gamma_wish is None else sequence.gamma_wish for sequence in sequences]

    def observe(self, batch: Batch, verdicts: abc.Sequence[Verdict], *, draft_seconds: float, verify_seconds: float) -> None:
        """Learns from a round."""
        judged = [(len(row.proposal.tokens), verdict.accepted) for row, verdict in batch.pair(verdicts) if row.proposal and row.proposal.tokens]
        if judged:
            self._hits = _DECAY * self._hits + sum(accepted for _, accepted in judged)
            self._trials = _DECAY * self._trials + sum(min(accepted + 1, proposed) for proposed, accepted in judged)  # unknown past a refusal
        if batch.is_steady:
            self._time(batch, draft_seconds=draft_seconds, verify_seconds=verify_seconds)
        if self._fixed is None:
            self._best = best_gamma(self.alpha, self.cost, self._max_gamma)
            self._resting = 0 if self._best else self._resting + 1

    def _time(self, batch: Batch, *, draft_seconds: float, verify_seconds: float) -> None:
        self._verify_seconds = _blend(self._verify_seconds, verify_seconds)
        passes = max((len(row.proposal.tokens) for row in batch.rows if row.proposal is not None), default=0)
        if passes:
            self._pass_seconds = _blend(self._pass_seconds, draft_seconds / passes)


def _blend(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _BLEND * (value - mean)
