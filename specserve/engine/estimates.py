"""What passes cost, from what they have cost: the target's by the rows in them, the draft's by depth. Knows no acceptance."""

from __future__ import annotations

from collections import abc, deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]

_BLEND = 0.1  # of the newest seconds into their running mean
_SLOW = 0.005  # the same for what describes the machine: its moods last for some tens of rounds, and must not look like steepness
_TRUST = 0.02  # variance of (relative) row counts that must be seen before the measured steepness counts as much as the curve's
_HOPED_COST = 0.1  # one draft pass over one target pass, before anything is measured
_SHORTEST = (
    1e-5  # seconds: drafts that came sooner than those that were ready cost something all the same
)
_FEW, _LAST = (
    3,
    15,
)  # waits for drafts: as many must have been seen before they are believed, and so many are remembered
_GUESSED_CURVE = ((1, 1.0), (256, 6.0))  # for a target that did not say


class Costs:
    """The shape of the target's curve comes from its warm-up, its height from the last rounds, and its steepness from both."""

    def __init__(self, curve: abc.Sequence[tuple[int, float]]) -> None:
        rows, seconds = zip(*(curve or _GUESSED_CURVE), strict=True)
        self._rows, self._seconds = (
            np.array(rows, dtype=float),
            np.maximum.accumulate(np.array(seconds)),
        )
        self._mean_rows = float(rows[0])
        self._mean_seconds: float | None = None  # until a round was seen
        self._steepness = np.array(
            [_TRUST, _TRUST]
        )  # covariance and variance, so that their ratio starts at 1
        self._passes: deque[float] = deque(
            maxlen=_LAST
        )  # seconds of one, in the last rounds that waited
        self.wait = 0.0  # for proposals that are ready
        self.hit_rate = 0.0  # of proposals, prepared in advance

    def verify(self, rows: float | Reals) -> Reals:
        """Seconds of a pass."""
        mean = (
            self._mean_seconds
            if self._mean_seconds is not None
            else float(self._curve(self._mean_rows))
        )
        slope = self._steepness[0] / self._steepness[1]
        seconds: Reals = mean * np.maximum(
            0.1, 1 + slope * (self._curve(rows) / self._curve(self._mean_rows) - 1)
        )
        return seconds

    @property
    def draft_pass(self) -> float:
        """Seconds of one more token for all that draft. The middle of what was seen: a first pass of its shape can take twenty times as long,
        and where proposals are prepared in advance there may be no second one for long.
        """
        return (
            median(self._passes)
            if len(self._passes) >= _FEW
            else _HOPED_COST * float(self.verify(self._mean_rows))
        )

    def observe_verify(self, rows: int, seconds: float) -> None:
        seconds = max(seconds, 1e-9)  # a clock may stand still
        if self._mean_seconds is None:
            self._mean_rows, self._mean_seconds = float(rows), seconds
            return
        more, longer = (
            self._curve(rows) / self._curve(self._mean_rows) - 1,
            seconds / self._mean_seconds - 1,
        )
        self._steepness = np.maximum(
            (1 - _SLOW) * self._steepness
            + _SLOW * np.array([_TRUST + more * longer, _TRUST + more * more]),
            1e-3,
        )
        self._mean_rows += _BLEND * (rows - self._mean_rows)
        self._mean_seconds += _BLEND * (seconds - self._mean_seconds)

    def observe_draft(self, seconds: float, *, passes: int, hits: int, proposals: int) -> None:
        """The seconds that a round waited for its proposals: `passes` deep where something had to be drafted, 0 where all were prepared."""
        self.hit_rate += _BLEND * (hits / proposals - self.hit_rate)
        if not passes:
            self.wait += _BLEND * (seconds - self.wait)
            return
        self._passes.append(max(seconds - self.wait, _SHORTEST) / passes)

    def doubt_draft(self) -> None:
        """What drafting was seen to take was long ago, or in passes that were the first of their shapes."""
        self._passes.clear()

    def _curve(self, rows: float | Reals) -> Reals:
        """By straight lines between what was measured, and on as the last of them runs."""
        rows = np.asarray(rows, dtype=float)
        inside = np.interp(rows, self._rows, self._seconds)
        if len(self._rows) < 2:
            return inside
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._rows[-1] - self._rows[-2])
        beyond: Reals = inside + slope * np.maximum(0.0, rows - self._rows[-1])
        return beyond
