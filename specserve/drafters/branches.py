"""Choose the branches to draft for: the likeliest outcomes of a proposal.

The drafter's own estimates are calibrated by how often they have come true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specserve.drafters.base import NO_TOKEN, OutcomeForecast

T = TypeVar("T")
Flags = NDArray[np.bool_]
Ranks = Sequence[Sequence[float]] | NDArray[Any]
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
        calibrated: Reals = (self._true / self._seen)[_buckets(estimates)]
        return calibrated

    def observe(self, estimates: Reals, true: Flags, rows: NDArray[np.int64]) -> None:
        """Record which events came true; events of one outcome have one row number.

        Earlier observations decay once an outcome, in its buckets only.
        """
        buckets = _buckets(estimates)
        is_touched = np.zeros((int(rows.max(initial=-1)) + 1, _NUM_BUCKETS), bool)
        is_touched[rows, buckets] = True
        decay = _DECAY ** is_touched.sum(0)
        self._seen *= decay
        self._true *= decay
        self._seen += np.bincount(buckets, minlength=_NUM_BUCKETS)
        self._true += np.bincount(buckets[true], minlength=_NUM_BUCKETS)


@dataclass(frozen=True, slots=True)
class ObservedOutcome:
    """A forecast that came to an end: `accepted` draft tokens were accepted, then came `token`."""

    forecast: OutcomeForecast
    accepted: int
    token: int


@dataclass(slots=True)
class _ModeCalibrations:
    """Calibrations of one mode of drawing."""

    accepted: Calibration = field(default_factory=Calibration)  # draft tokens
    next: Calibration = field(default_factory=Calibration)  # tokens in place of a rejected one
    bonus: Calibration = field(default_factory=Calibration)  # tokens after all draft tokens


class Fanout:
    """Selection of branches: more where a rejection is likelier or a sequence is uncertain.

    With `per_position`, that many at each position, likely or not.
    """

    def __init__(self, *, width: int = 64, per_position: int | None = None) -> None:
        self.width = width if per_position is None else per_position
        self.per_position = per_position
        self._calibrations: dict[str, _ModeCalibrations] = {}

    def observe(self, outcomes: Sequence[ObservedOutcome]) -> None:
        """Learn from what became of forecasts."""
        for mode, of_mode in _by_mode(outcomes, lambda outcome: outcome.forecast.mode):
            calibrations = self._calibrations.setdefault(mode, _ModeCalibrations())
            estimates = _Estimates.of([outcome.forecast for outcome in of_mode])
            accepted = np.array([outcome.accepted for outcome in of_mode])
            rows = np.arange(len(of_mode))
            is_bonus = accepted == estimates.num_drafts
            # A draft token past a rejection was not verified.
            is_verified = estimates.is_draft & (np.arange(estimates.width) <= accepted[:, None])
            calibrations.accepted.observe(
                estimates.confidence[is_verified],
                (np.arange(estimates.width) < accepted[:, None])[is_verified],
                np.nonzero(is_verified)[0],
            )
            followed = np.array([outcome.token for outcome in of_mode])
            tokens, probs = estimates.tokens[rows, accepted], estimates.probs[rows, accepted]
            for calibration, is_of in (
                (calibrations.next, ~is_bonus),
                (calibrations.bonus, is_bonus),
            ):
                is_seen = (tokens != NO_TOKEN) & is_of[:, None]
                calibration.observe(
                    probs[is_seen],
                    (tokens == followed[:, None])[is_seen],
                    np.nonzero(is_seen)[0],
                )

    def choose(self, forecasts: Sequence[OutcomeForecast], max_branches: int) -> list[Branch]:
        """Return the likeliest branches of all sequences together, likeliest first."""
        found: list[tuple[float, Branch]] = []
        for mode, of_mode in _by_mode(forecasts, lambda forecast: forecast.mode):
            estimates = _Estimates.of(of_mode)
            found += self._ranked(mode, estimates, max_branches)
        found.sort(key=lambda pair: -pair[0])
        return [branch for _, branch in found[:max_branches]]

    def position_probs(self, forecast: OutcomeForecast) -> Reals:  # [position]
        """Return the probability that exactly i draft tokens are accepted, for each i."""
        calibrations = self._calibrations.setdefault(forecast.mode, _ModeCalibrations())
        (probs,) = _position_probs(calibrations, _Estimates.of([forecast]))
        return np.asarray(probs)

    def _ranked(
        self, mode: str, estimates: _Estimates, max_branches: int
    ) -> list[tuple[float, Branch]]:
        """Return the likeliest branches of forecasts of one mode, with their probabilities."""
        calibrations = self._calibrations.setdefault(mode, _ModeCalibrations())
        position_probs = _position_probs(calibrations, estimates)
        probs = calibrations.next.calibrate(estimates.probs)
        sequences = np.arange(len(probs))
        probs[sequences, estimates.num_drafts] = calibrations.bonus.calibrate(
            estimates.probs[sequences, estimates.num_drafts]
        )
        probs *= position_probs[:, :, None]
        is_candidate = estimates.tokens != NO_TOKEN
        if self.per_position is None:
            is_candidate &= probs > _MIN_PROBABILITY
        indices = np.nonzero(is_candidate)
        values = probs[indices]
        best = np.argsort(-values, kind="stable")[:max_branches]
        rows, positions, _ = (axis[best].tolist() for axis in indices)
        return [
            (value, Branch(estimates.seq_ids[row], position, token))
            for value, row, position, token in zip(
                values[best].tolist(),
                rows,
                positions,
                estimates.tokens[indices][best].tolist(),
                strict=True,
            )
        ]


@dataclass(frozen=True, slots=True)
class _Estimates:
    """Forecasts of many sequences as arrays, padded to the longest."""

    seq_ids: list[int]
    num_drafts: NDArray[np.int64]  # [sequence]
    confidence: Reals  # [sequence, position]
    tokens: NDArray[np.int64]  # [sequence, position, rank]; NO_TOKEN as padding
    probs: Reals  # [sequence, position, rank]

    @property
    def width(self) -> int:
        """Number of positions."""
        return len(self.tokens[0])

    @property
    def is_draft(self) -> Flags:  # [sequence, position]
        """True where a position has a draft token."""
        return np.arange(self.width) < self.num_drafts[:, None]

    @classmethod
    def of(cls, forecasts: Sequence[OutcomeForecast]) -> _Estimates:
        """Return them as arrays. Estimates that a drafter lacks are halved from rank to rank."""
        num_positions = max(forecast.num_positions for forecast in forecasts)
        num_ranks = max(
            len(ranks) for forecast in forecasts for ranks in _rows(forecast.next_tokens)
        )
        shape = (len(forecasts), num_positions, num_ranks)
        tokens = np.full(shape, NO_TOKEN)
        probs = np.broadcast_to(0.5 ** np.arange(1.0, num_ranks + 1), shape).copy()
        confidence = np.full(shape[:2], 0.5)
        for i, forecast in enumerate(forecasts):
            _fill(tokens[i], forecast.next_tokens)
            _fill(probs[i], forecast.next_probs)
            confidence[i, : len(forecast.confidence)] = forecast.confidence
        num_drafts = np.array([forecast.num_positions - 1 for forecast in forecasts])
        return cls(
            [forecast.seq_id for forecast in forecasts], num_drafts, confidence, tokens, probs
        )


def _position_probs(calibrations: _ModeCalibrations, estimates: _Estimates) -> Reals:
    """Return the probability that exactly i draft tokens are accepted, [sequence, position]."""
    accepted = calibrations.accepted.calibrate(estimates.confidence) * estimates.is_draft
    reached = np.cumprod(np.insert(accepted, 0, 1.0, axis=1), axis=1)
    return reached[:, :-1] - reached[:, 1:]


def _by_mode(items: Sequence[T], mode: Callable[[T], str]) -> Iterator[tuple[str, list[T]]]:
    """Yield each mode and its items, in order."""
    for name in dict.fromkeys(map(mode, items)):
        yield name, [item for item in items if mode(item) == name]


def _rows(ranks: Ranks) -> Ranks:
    """Return the rows of ranks that may differ in length; of an array one stands for all."""
    return ranks[:1] if isinstance(ranks, np.ndarray) else ranks


def _fill(array: NDArray[Any], ranks: Ranks) -> None:
    """Write ranks to the beginning of an array's rows."""
    if isinstance(ranks, np.ndarray):
        array[: ranks.shape[0], : ranks.shape[1]] = ranks
    else:
        for row, values in zip(array, ranks, strict=False):
            row[: len(values)] = values


def _buckets(estimates: Reals) -> NDArray[np.int64]:
    buckets: NDArray[np.int64] = np.clip(
        -2 * np.log2(np.maximum(estimates, 1e-9)), 0, _NUM_BUCKETS - 1
    ).astype(np.int64)
    return buckets
