"""Which continuations are worth preparing: learnt from where proposals were stopped, and at which rank the token stood that came next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specserve.drafters.base import Outlook

_DECAY = 0.99  # of what was seen, an observation
_LEAST = 0.002  # a continuation less likely than that is not worth a row
_HOPED = 0.7  # acceptance before anything was seen


@dataclass(frozen=True, slots=True)
class Branch:
    """One continuation of an outlook: so many drafts are accepted, then comes this token."""

    seq_id: int
    accepted: int
    token: int


class Fanout:
    """More branches where the stop is more likely, down to ranks that seldom come; or `per_stop` at each, likely or not."""

    def __init__(self, *, width: int = 16, per_stop: int | None = None) -> None:
        self.width, self.per_stop = width if per_stop is None else per_stop, per_stop
        self._reached = np.full(1, 2.0)  # [position] drafts that were judged there
        self._passed = np.full(1, 2.0 * _HOPED)  # and accepted
        # How often the next token had each rank (the last place: none of them), after a refusal and behind the last draft.
        hoped = np.append(0.5 ** np.arange(1, self.width + 1), 0.1)
        self._ranks = {True: hoped.copy(), False: hoped.copy()}

    def observe(self, outlook: Outlook, accepted: int, token: int) -> None:
        """Of `outlook`, so many drafts were accepted, and then came this token."""
        drafted = outlook.num_stops - 1
        self._grow(drafted)
        self._reached[:drafted] *= _DECAY
        self._passed[:drafted] *= _DECAY
        self._reached[: min(accepted + 1, drafted)] += 1
        self._passed[:accepted] += 1
        ranks, nexts = self._ranks[accepted < drafted], outlook.nexts[accepted]
        ranks *= _DECAY
        ranks[nexts.index(token) if token in nexts else self.width] += 1

    def choose(self, outlooks: Sequence[Outlook], most: int) -> list[Branch]:
        """About `most` branches in all, an equal share for each sequence, the likeliest first."""
        if not outlooks:
            return []
        share = max(1, most // len(outlooks))
        places = {drafted: self._places(drafted)[:share] for drafted in {outlook.num_stops - 1 for outlook in outlooks}}
        chosen = [
            (turn, Branch(outlook.seq_id, stop, outlook.nexts[stop][rank]))
            for outlook in outlooks
            for turn, (stop, rank) in enumerate(places[outlook.num_stops - 1])
            if rank < len(outlook.nexts[stop])
        ]
        return [branch for _, branch in sorted(chosen, key=lambda pair: pair[0])]  # so that every sequence gets its likeliest first

    def stops(self, drafted: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:  # [drafted + 1]
        """How likely each stop is, once so many tokens were drafted."""
        self._grow(drafted)
        alive = np.append(1.0, np.cumprod(self._passed[:drafted] / self._reached[:drafted]))
        return np.append(alive[:-1] - alive[1:], alive[-1])

    def _places(self, drafted: int) -> list[tuple[int, int]]:
        """Stops and ranks, the likeliest first."""
        stops = self.stops(drafted)
        if self.per_stop is not None:
            return [(stop, rank) for rank in range(self.per_stop) for stop in np.argsort(-stops).tolist()]
        refusal, bonus = (ranks[:-1] / ranks.sum() for ranks in (self._ranks[True], self._ranks[False]))
        weights = np.concatenate([stops[:-1, None] * refusal, stops[-1:, None] * bonus])  # [stops, width]
        order = np.argsort(-weights, axis=None)[: int((weights >= _LEAST).sum())]
        return [divmod(int(place), self.width) for place in order]

    def _grow(self, drafted: int) -> None:
        """Positions that were never seen are hoped to be like any."""
        missing = drafted - len(self._reached)
        if missing > 0:
            self._reached = np.append(self._reached, np.full(missing, 2.0))
            self._passed = np.append(self._passed, np.full(missing, 2.0 * _HOPED))
