"""Choose the branches to draft for: the likeliest outcomes of a proposal.

The drafter's own estimates are calibrated by how often they have come true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specserve.drafters.base import OutcomeForecast

Reals = NDArray[np.float64]

_MIN_PROBABILITY = 0.0003
"""A less likely outcome is not worth a row of the pass."""
_DECAY = 0.997
"""Factor on earlier observations, at each new one."""
_PRIOR_OBSERVATIONS = 4.0
"""Observations that the drafter's own estimate counts for."""
_NUM_BUCKETS = 24
"""Buckets of estimates, each half an octave wide."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One outcome of a forecast: `accepted` draft tokens are accepted, then comes `token`."""

    seq_id: int
    accepted: int
    token: int


class Calibration:
    """Measured frequency of events, by the probability that the drafter estimated."""

    def __init__(self) -> None:
        self._seen: Reals = np.full(_NUM_BUCKETS, _PRIOR_OBSERVATIONS)
        self._true: Reals = (
            np.exp2(-0.5 * np.arange(float(_NUM_BUCKETS)) - 0.25) * _PRIOR_OBSERVATIONS
        )

    def calibrate(self, estimates: Reals) -> Reals:
        """Return the measured probability for each estimate."""
        buckets = _buckets(estimates)
        return self._true[buckets] / self._seen[buckets]

    def observe(self, estimates: Reals, true: NDArray[np.bool_]) -> None:
        """Record which events came true. Earlier observations decay in the same buckets only."""
        buckets = _buckets(estimates)
        touched = np.unique(buckets)
        self._seen[touched] *= _DECAY
        self._true[touched] *= _DECAY
        np.add.at(self._seen, buckets, 1.0)
        np.add.at(self._true, buckets[true], 1.0)


class Fanout:
    """Selection of branches: more where a rejection is likelier or a sequence is uncertain.

    With `per_position`, that many at each position, likely or not.
    """

    def __init__(self, *, width: int = 64, per_position: int | None = None) -> None:
        self.width = width if per_position is None else per_position
        self.per_position = per_position
        # By mode: how often a draft token is accepted.
        self._accepted: dict[str, Calibration] = {}
        # By mode, and whether all draft tokens were accepted: how often a next token comes.
        self._next: dict[tuple[str, bool], Calibration] = {}

    def observe(self, forecast: OutcomeForecast, accepted: int, token: int) -> None:
        """Learn that `accepted` draft tokens of the forecast were accepted and `token` followed."""
        num_drafts = forecast.num_positions - 1
        num_verified = min(accepted + 1, num_drafts)
        if num_verified:
            self._accept_calibration(forecast).observe(
                _confidence(forecast)[:num_verified], np.arange(num_verified) < accepted
            )
        next_tokens = forecast.next_tokens[accepted]
        if next_tokens:
            self._next_calibration(forecast, accepted).observe(
                _next_probs(forecast, accepted), np.array(next_tokens) == token
            )

    def choose(self, forecasts: Sequence[OutcomeForecast], max_branches: int) -> list[Branch]:
        """Return the likeliest branches of all sequences together, likeliest first."""
        ranked: list[tuple[float, Branch]] = []
        for forecast in forecasts:
            position_probs = self.position_probs(forecast)
            for position, next_tokens in enumerate(forecast.next_tokens):
                if position_probs[position] > _MIN_PROBABILITY or self.per_position is not None:
                    probs = position_probs[position] * self._next_calibration(
                        forecast, position
                    ).calibrate(_next_probs(forecast, position))
                    ranked += [
                        (prob, Branch(forecast.seq_id, position, token))
                        for prob, token in zip(probs.tolist(), next_tokens, strict=True)
                    ]
        if self.per_position is None:
            ranked = [pair for pair in ranked if pair[0] > _MIN_PROBABILITY]
        ranked.sort(key=lambda pair: -pair[0])
        return [branch for _, branch in ranked[:max_branches]]

    def position_probs(self, forecast: OutcomeForecast) -> Reals:  # [position]
        """Return the probability that exactly i draft tokens are accepted, for each i."""
        accepted = self._accept_calibration(forecast).calibrate(_confidence(forecast))
        reached = np.append(1.0, np.cumprod(accepted))
        return np.append(reached[:-1] - reached[1:], reached[-1])

    def _accept_calibration(self, forecast: OutcomeForecast) -> Calibration:
        return self._accepted.setdefault(forecast.mode, Calibration())

    def _next_calibration(self, forecast: OutcomeForecast, position: int) -> Calibration:
        is_last = position == forecast.num_positions - 1
        return self._next.setdefault((forecast.mode, is_last), Calibration())


def _confidence(forecast: OutcomeForecast) -> Reals:
    """Return the drafter's confidence, or one half for each draft token if it has none."""
    if forecast.confidence:
        return np.array(forecast.confidence)
    return np.full(forecast.num_positions - 1, 0.5)


def _next_probs(forecast: OutcomeForecast, position: int) -> Reals:
    """Return the drafter's estimates, or half of the remaining probability for each rank."""
    if forecast.next_probs:
        return np.array(forecast.next_probs[position])
    return 0.5 ** np.arange(1.0, len(forecast.next_tokens[position]) + 1)


def _buckets(estimates: Reals) -> NDArray[np.int64]:
    buckets: NDArray[np.int64] = np.clip(
        -2 * np.log2(np.maximum(estimates, 1e-9)), 0, _NUM_BUCKETS - 1
    ).astype(np.int64)
    return buckets
