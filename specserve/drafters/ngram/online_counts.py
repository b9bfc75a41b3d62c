"""What follows what, learnt from the texts that pass by. The same rows as those of a file, but they change. Knows no prompts and no draws."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from specserve.drafters.ngram.tables import Counts, Row

_PAIRS, _SINGLES = (
    4,
    64,
)  # tokens that are counted for each that a row has room for: after one token, and in all
_FRESH = 8  # a row is made anew when its counts have grown by an eighth


class Tally:
    """How often each token came. When there are too many, all counts are halved and the rarest forgotten."""

    __slots__ = ("_counts", "_due", "_room", "_row", "_total", "_width")

    def __init__(self, counts: dict[int, int], *, width: int, room: int) -> None:
        self._counts, self._total, self._width, self._room = (
            counts,
            sum(counts.values()),
            width,
            room,
        )
        self._row: Row | None = None
        self._due = 0  # the total at which the row is made anew

    def add(self, token: int) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1
        self._total += 1
        if len(self._counts) > self._room:
            self._forget()

    def row(self) -> Row | None:
        """The likeliest tokens as of a little while ago; what was handed out never changes."""
        if self._total >= self._due and self._counts:
            ranked = sorted(self._counts.items(), key=lambda pair: (-pair[1], pair[0]))[
                : self._width
            ]
            ids, weights = zip(*ranked, strict=True)
            self._row = Row.of(ids, weights, width=self._width)
            self._due = self._total + self._total // _FRESH + 1
        return self._row

    def _forget(self) -> None:
        halved = {token: times // 2 for token, times in self._counts.items() if times > 1}
        latest = next(reversed(self._counts))
        self._counts = halved or {latest: 1}
        self._total = sum(self._counts.values())
        self._due = 0


class Learnt:
    """Counts single tokens and pairs, beginning with those of a file if there is one. `row` follows the token before, or ignores it.

    Sequences learn from one another. So requests that share a seed on purpose must not share noise otherwise than `coupled` allows,
    which is what a seeded request gets unless it asks for another verifier.
    """

    def __init__(self, start: Counts | None = None, *, width: int, pairs: bool = True) -> None:
        self._start, self._width, self._pairs = start, width, pairs
        counted = (
            {}
            if start is None
            else {token: times for token, times in enumerate(start.unigram.tolist()) if times}
        )
        self._single = Tally(counted, width=width, room=max(_SINGLES * width, len(counted)))
        self._after: dict[int, Tally] = {}

    def learn(self, tokens: Sequence[int]) -> None:
        """All but the first are new; the first is what the second followed."""
        for before, token in pairwise(tokens):
            self._single.add(token)
            if self._pairs:
                self._followers(before).add(token)

    def row(self, token: int, position: int) -> Row | None:
        row = self._followers(token).row() if self._pairs else None
        return row or self._single.row()

    def _followers(self, token: int) -> Tally:
        found = self._after.get(token)
        if found is None:
            found = self._after[token] = Tally(
                self._counted(token), width=self._width, room=_PAIRS * self._width
            )
        return found

    def _counted(self, token: int) -> dict[int, int]:
        """In the file."""
        start = self._start
        if start is None or token >= start.vocab_size:
            return {}
        followers = slice(int(start.starts[token]), int(start.starts[token + 1]))
        return dict(
            zip(start.ids[followers].tolist(), start.counts[followers].tolist(), strict=True)
        )
