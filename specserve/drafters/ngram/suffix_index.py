"""Where a text went on the last time it ended as it ends now: its places, sorted by what precedes them. Knows no drafts and no requests.

A place is filed under its token, by the tokens before it, nearest first. Of all places filed under the text's last token, those that share
most with its end are the last place's neighbours in that order. So the longest match is found by bisection, and a place is added, and
taken away again, at the same price, whatever the text.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST = 16  # tokens of an ending that are compared; one that agrees in more predicts no better
NEAR = 4  # places on either side among which the latest is looked for
_WIDTH = 4  # bytes of a token, and of a place, big-endian, so that bytes sort as numbers do


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier ending that is the same as the text's own."""

    after: int  # the place where the text went on from there
    length: int  # tokens that agree, `longest` at most


class Endings:
    """A text that grows and shrinks at its end. Some 150 bytes and one to two microseconds a token."""

    def __init__(self, *, longest: int = LONGEST) -> None:
        self.tokens: list[int] = []
        self._size = (
            longest - 1
        ) * _WIDTH  # of a key without its place; the token itself says under which key it lies
        self._keys: list[bytes] = []  # [place]: the tokens before it, nearest first, and the place
        self._filed: defaultdict[int, list[bytes]] = defaultdict(
            list
        )  # by token: the keys of its places, in order

    def extend(self, tokens: Sequence[int]) -> None:
        before = self._before()
        for token in tokens:
            key = before + len(self.tokens).to_bytes(_WIDTH, "big")
            insort(self._filed[token], key)
            self._keys.append(key)
            self.tokens.append(token)
            before = (token.to_bytes(_WIDTH, "big") + before)[: self._size]

    def truncate(self, length: int) -> None:
        for _ in range(len(self.tokens) - length):
            filed = self._filed[self.tokens.pop()]
            del filed[bisect_left(filed, self._keys.pop())]

    def match(self) -> Match | None:
        """The longest there is. Of as long ones the latest, if it is among the nearest few; of those that agree in full, always."""
        if not self.tokens:
            return None
        filed, own, at = self._last()
        beside = filed[max(at - NEAR, 0) : at] + filed[at + 1 : at + 1 + NEAR]
        if not beside:
            return None
        length = max(
            self._common(own, key) for key in filed[max(at - 1, 0) : at] + filed[at + 1 : at + 2]
        )
        agreed = own[: length * _WIDTH]
        place = max([key[-_WIDTH:] for key in beside if key.startswith(agreed)])
        return Match(int.from_bytes(place, "big") + 1, 1 + length)

    def copied(self, match: Match, count: int) -> tuple[int, ...]:
        """What followed the match. Where that runs into the end of the text it goes on with itself: a loop stays a loop."""
        found = self.tokens[match.after : match.after + count]
        missing = count - len(found)
        return tuple(found * (1 + -(-missing // len(found))))[:count] if missing else tuple(found)

    def nexts(self, width: int) -> list[int]:
        """Up to `width` tokens that followed endings like the text's own: of the nearest in order, the longest first, the latest of as long ones."""
        if not self.tokens:
            return []
        filed, own, at = self._last()
        beside = filed[max(at - width, 0) : at] + filed[at + 1 : at + 1 + width]
        beside.sort(key=lambda key: (self._common(own, key), key[-_WIDTH:]), reverse=True)
        return list(
            dict.fromkeys(self.tokens[int.from_bytes(key[-_WIDTH:], "big") + 1] for key in beside)
        )[:width]

    def _last(self) -> tuple[list[bytes], bytes, int]:
        """The keys among which that of the last place lies, that key, and where it lies."""
        filed, own = self._filed[self.tokens[-1]], self._keys[-1]
        return filed, own, bisect_left(filed, own)

    def _common(self, a: bytes, b: bytes) -> int:
        """How many of the tokens before two places agree. What stands before the beginning agrees with nothing."""
        differing = int.from_bytes(a[: self._size], "big") ^ int.from_bytes(b[: self._size], "big")
        return (self._size - (differing.bit_length() + 7) // 8) // _WIDTH

    def _before(self) -> bytes:
        """The tokens before the next place. Before the beginning stands what is no token."""
        if not self.tokens:
            return b"\xff" * self._size
        return (self.tokens[-1].to_bytes(_WIDTH, "big") + self._keys[-1])[: self._size]
