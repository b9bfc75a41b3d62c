"""Tables of what follows what that are counted while texts are served.

Their rows are like a file's, but they change. Knows no prompts and no draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from specserve.drafters.ngram.tables import Counts, TableRow

_FOLLOWERS_PER_WIDTH = 4
"""Tokens that are counted after one token, for each that a row has room for."""
_TOKENS_PER_WIDTH = 64
"""Tokens that are counted in all, for each that a row has room for."""
_REBUILD_FRACTION = 8
"""A row is rebuilt when its counts have grown by an eighth."""


class OnlineCounts:
    """Frequencies of tokens, updated one by one.

    When there are more than `max_tokens`, all counts are halved and the rarest tokens dropped.
    """

    __slots__ = ("_counts", "_max_tokens", "_rebuild_at", "_row", "_total", "_width")

    def __init__(self, counts: dict[int, int], *, width: int, max_tokens: int) -> None:
        self._counts, self._total, self._width, self._max_tokens = (
            counts,
            sum(counts.values()),
            width,
            max_tokens,
        )
        self._row: TableRow | None = None
        # The total at which the row is rebuilt.
        self._rebuild_at = 0

    def add(self, token: int) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1
        self._total += 1
        if len(self._counts) > self._max_tokens:
            self._halve()

    def row(self) -> TableRow | None:
        """Return the likeliest tokens as of a recent update; a returned row never changes."""
        if self._total >= self._rebuild_at and self._counts:
            ranked = sorted(self._counts.items(), key=lambda pair: (-pair[1], pair[0]))[
                : self._width
            ]
            ids, weights = zip(*ranked, strict=True)
            self._row = TableRow.from_weights(ids, weights, width=self._width)
            self._rebuild_at = self._total + self._total // _REBUILD_FRACTION + 1
        return self._row

    def _halve(self) -> None:
        halved = {token: count // 2 for token, count in self._counts.items() if count > 1}
        latest = next(reversed(self._counts))
        self._counts = halved or {latest: 1}
        self._total = sum(self._counts.values())
        self._rebuild_at = 0


class OnlineTable:
    """Counts of single tokens and pairs, starting with a file's if there is one.

    `row` is by the token before, or by none without `pairs`. Sequences learn from one another. So
    requests that share a seed on purpose must share noise only as `coupled` allows, which is what a
    seeded request gets unless it asks for another verifier.
    """

    def __init__(self, initial: Counts | None = None, *, width: int, pairs: bool = True) -> None:
        self._initial, self._width, self._pairs = initial, width, pairs
        counted = (
            {}
            if initial is None
            else {token: count for token, count in enumerate(initial.unigram.tolist()) if count}
        )
        self._single = OnlineCounts(
            counted, width=width, max_tokens=max(_TOKENS_PER_WIDTH * width, len(counted))
        )
        self._after: dict[int, OnlineCounts] = {}

    def learn(self, tokens: Sequence[int]) -> None:
        """Count all tokens but the first, which only says what the second followed."""
        for before, token in pairwise(tokens):
            self._single.add(token)
            if self._pairs:
                self._followers(before).add(token)

    def row(self, token: int, position: int) -> TableRow | None:
        row = self._followers(token).row() if self._pairs else None
        return row or self._single.row()

    def _followers(self, token: int) -> OnlineCounts:
        found = self._after.get(token)
        if found is None:
            found = self._after[token] = OnlineCounts(
                self._initial_followers(token),
                width=self._width,
                max_tokens=_FOLLOWERS_PER_WIDTH * self._width,
            )
        return found

    def _initial_followers(self, token: int) -> dict[int, int]:
        initial = self._initial
        if initial is None or token >= initial.vocab_size:
            return {}
        followers = slice(int(initial.starts[token]), int(initial.starts[token + 1]))
        return dict(
            zip(initial.ids[followers].tolist(), initial.counts[followers].tolist(), strict=True)
        )
