"""Which continuations are worth preparing: the likeliest, by the drafter's own opinion and by what that opinion has been worth until now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specserve.drafters.base import Outlook

Reals = NDArray[np.float64]

_LEAST = 0.0003  # a continuation less likely than that is not worth a row
_DECAY = 0.997  # of what was seen, an observation
_FAITH = 4.0  # observations that a drafter's opinion counts for
_BUCKETS = 24  # half octaves of shares


@dataclass(frozen=True, slots=True)
class Branch:
    """One continuation of an outlook: so many drafts are accepted, then comes this token."""

    seq_id: int
    accepted: int
    token: int


class Calibration:
    """How often what was given such a share came true."""

    def __init__(self) -> None:
        self._seen: Reals = np.full(_BUCKETS, _FAITH)
        self._true: Reals = np.exp2(-0.5 * np.arange(float(_BUCKETS)) - 0.25) * _FAITH

    def of(self, shares: Reals) -> Reals:
        buckets = _buckets(shares)
        return self._true[buckets] / self._seen[buckets]

    def observe(self, shares: Reals, true: NDArray[np.bool_]) -> None:
        """Old observations give way to new ones, as far as there are any in the same bucket."""
        buckets = _buckets(shares)
        touched = np.unique(buckets)
        self._seen[touched] *= _DECAY
        self._true[touched] *= _DECAY
        np.add.at(self._seen, buckets, 1.0)
        np.add.at(self._true, buckets[true], 1.0)


class Fanout:
    """More branches where the stop is likelier, for every sequence as many as it deserves; or `per_stop` at each stop, likely or not."""

    def __init__(self, *, width: int = 64, per_stop: int | None = None) -> None:
        self.width, self.per_stop = width if per_stop is None else per_stop, per_stop
        self._drafts: dict[str, Calibration] = {}  # by mode
        self._nexts: dict[
            tuple[str, bool], Calibration
        ] = {}  # by mode, and whether all drafts were accepted

    def observe(self, outlook: Outlook, accepted: int, token: int) -> None:
        """Of `outlook`, so many drafts were accepted, and then came this token."""
        drafted = outlook.num_stops - 1
        judged = min(accepted + 1, drafted)
        if judged:
            self._trust(outlook).observe(_trust(outlook)[:judged], np.arange(judged) < accepted)
        nexts = outlook.nexts[accepted]
        if nexts:
            self._next(outlook, accepted).observe(
                _shares(outlook, accepted), np.array(nexts) == token
            )

    def choose(self, outlooks: Sequence[Outlook], most: int) -> list[Branch]:
        """The `most` likeliest of all sequences together, the likeliest first."""
        ranked: list[tuple[float, Branch]] = []
        for outlook in outlooks:
            stops = self.stops(outlook)
            for stop, nexts in enumerate(outlook.nexts):
                if stops[stop] > _LEAST or self.per_stop is not None:
                    weights = stops[stop] * self._next(outlook, stop).of(_shares(outlook, stop))
                    ranked += [
                        (weight, Branch(outlook.seq_id, stop, token))
                        for weight, token in zip(weights.tolist(), nexts, strict=True)
                    ]
        if self.per_stop is None:
            ranked = [pair for pair in ranked if pair[0] > _LEAST]
        ranked.sort(key=lambda pair: -pair[0])
        return [branch for _, branch in ranked[:most]]

    def stops(self, outlook: Outlook) -> Reals:  # [stop]
        """How likely each is."""
        accepted = self._trust(outlook).of(_trust(outlook))
        alive = np.append(1.0, np.cumprod(accepted))
        return np.append(alive[:-1] - alive[1:], alive[-1])

    def _trust(self, outlook: Outlook) -> Calibration:
        return self._drafts.setdefault(outlook.mode, Calibration())

    def _next(self, outlook: Outlook, stop: int) -> Calibration:
        return self._nexts.setdefault((outlook.mode, stop == outlook.num_stops - 1), Calibration())


def _trust(outlook: Outlook) -> Reals:
    """Of a drafter without an opinion: that its drafts are as likely right as wrong."""
    return np.array(outlook.trust) if outlook.trust else np.full(outlook.num_stops - 1, 0.5)


def _shares(outlook: Outlook, stop: int) -> Reals:
    """Of a drafter without an opinion: half of what is left for each next rank."""
    return (
        np.array(outlook.shares[stop])
        if outlook.shares
        else 0.5 ** np.arange(1.0, len(outlook.nexts[stop]) + 1)
    )


def _buckets(shares: Reals) -> NDArray[np.int64]:
    buckets: NDArray[np.int64] = np.clip(
        -2 * np.log2(np.maximum(shares, 1e-9)), 0, _BUCKETS - 1
    ).astype(np.int64)
    return buckets
