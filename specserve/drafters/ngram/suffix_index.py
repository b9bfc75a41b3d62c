"""Find where a text continued the last time it ended as it ends now. Knows no drafts, no requests.

A position is kept under its token, sorted by the tokens before it, nearest first. Of all positions
under the text's last token, those that share most with the text's end are the last position's
neighbours in that order. So the longest match is found by bisection, and adding a position and
removing it cost the same, whatever the text.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

MAX_MATCH = 16
"""Tokens that are compared; a longer match predicts no better."""
NUM_NEIGHBOURS = 4
"""Positions on either side among which the latest is searched."""
_WIDTH = 4
"""Bytes of a token and of a position, big-endian, so that bytes sort as numbers do."""


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier ending that equals the text's own."""

    after: int
    """Position where the text continued."""
    length: int
    """Number of equal tokens, at most `max_match`."""


class SuffixIndex:
    """A text that grows and shrinks at its end.

    It takes some 150 bytes and one to two microseconds a token.
    """

    def __init__(self, *, max_match: int = MAX_MATCH) -> None:
        self.tokens: list[int] = []
        # Bytes of a key without its position. The token itself decides which list the key is in.
        self._size = (max_match - 1) * _WIDTH
        # [position] the tokens before it, nearest first, and the position.
        self._keys: list[bytes] = []
        # By token: the keys of its positions, sorted.
        self._by_last_token: defaultdict[int, list[bytes]] = defaultdict(list)

    def extend(self, tokens: Sequence[int]) -> None:
        before = self._next_sort_key()
        for token in tokens:
            key = before + len(self.tokens).to_bytes(_WIDTH, "big")
            insort(self._by_last_token[token], key)
            self._keys.append(key)
            self.tokens.append(token)
            before = (token.to_bytes(_WIDTH, "big") + before)[: self._size]

    def truncate(self, length: int) -> None:
        for _ in range(len(self.tokens) - length):
            keys = self._by_last_token[self.tokens.pop()]
            del keys[bisect_left(keys, self._keys.pop())]

    def match(self) -> Match | None:
        """Return the longest match.

        The latest of several equally long ones counts if it is among the nearest NUM_NEIGHBOURS on
        either side. The latest match of the full length always counts.
        """
        if not self.tokens:
            return None
        keys, own, i = self._last_key()
        neighbours = keys[max(i - NUM_NEIGHBOURS, 0) : i] + keys[i + 1 : i + 1 + NUM_NEIGHBOURS]
        if not neighbours:
            return None
        length = max(
            self._num_common(own, key) for key in keys[max(i - 1, 0) : i] + keys[i + 1 : i + 2]
        )
        common = own[: length * _WIDTH]
        position = max([key[-_WIDTH:] for key in neighbours if key.startswith(common)])
        return Match(int.from_bytes(position, "big") + 1, 1 + length)

    def continuation(self, match: Match, count: int) -> tuple[int, ...]:
        """Return the `count` tokens that followed the match.

        Past the end of the text it continues with itself, so a loop stays a loop.
        """
        found = self.tokens[match.after : match.after + count]
        missing = count - len(found)
        return tuple(found * (1 + -(-missing // len(found))))[:count] if missing else tuple(found)

    def next_tokens(self, width: int) -> list[int]:
        """Return up to `width` tokens that followed endings like the text's own.

        The tokens of the nearest positions come in order, longest match first, latest first among
        equally long ones.
        """
        if not self.tokens:
            return []
        keys, own, i = self._last_key()
        neighbours = keys[max(i - width, 0) : i] + keys[i + 1 : i + 1 + width]
        neighbours.sort(key=lambda key: (self._num_common(own, key), key[-_WIDTH:]), reverse=True)
        return list(
            dict.fromkeys(
                self.tokens[int.from_bytes(key[-_WIDTH:], "big") + 1] for key in neighbours
            )
        )[:width]

    def _last_key(self) -> tuple[list[bytes], bytes, int]:
        """Return the sorted keys of the last token, the last position's key, and its index."""
        keys, own = self._by_last_token[self.tokens[-1]], self._keys[-1]
        return keys, own, bisect_left(keys, own)

    def _num_common(self, a: bytes, b: bytes) -> int:
        """Return how many tokens before two positions are equal.

        The padding before the start of the text equals nothing.
        """
        differing = int.from_bytes(a[: self._size], "big") ^ int.from_bytes(b[: self._size], "big")
        return (self._size - (differing.bit_length() + 7) // 8) // _WIDTH

    def _next_sort_key(self) -> bytes:
        """Return the sort key of the next position.

        It consists of the preceding tokens, padded with 0xff before the start of the text.
        """
        if not self.tokens:
            return b"\xff" * self._size
        return (self.tokens[-1].to_bytes(_WIDTH, "big") + self._keys[-1])[: self._size]
