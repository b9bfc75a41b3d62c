"""What would be written and what is guessed of it, as fixed functions of seed, sequence and position. Nothing depends on the order of asking."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from specserve.config.fields import items, number, setting

VOCAB = 2**31
_TRUE = 2**30  # true tokens lie below it; what lies close above one is wrong in its place
_BITS, _GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15
_BLOCK = 64  # positions that are drawn at a time
_NEVER = 2**31  # a rank that nobody looks at


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How good the draft is. The default ranks are those measured on the demo pair, greedy; 5 to 7 are interpolated."""

    alpha: float = setting(0.75, number(0, 1))  # of a draft token whose predecessors were accepted
    by_position: tuple[float, ...] = setting(
        (), items(number(0, 1))
    )  # the same by place in the proposal, the last one for all further
    ranks: tuple[float, ...] = setting(
        (0.59, 0.70, 0.76, 0.81, 0.83, 0.85, 0.865, 0.88), items(number(0, 1))
    )
    # the share of refusals (or ends) whose next token is among the draft's 1, 2, 3, ... likeliest there

    def at(self, depth: int) -> float:
        """The chance of the draft token at that place of a proposal, from 0."""
        return (
            self.by_position[min(depth, len(self.by_position) - 1)]
            if self.by_position
            else self.alpha
        )


class Truth:
    """One replica's texts. Remembers what it has drawn of each sequence, until told to forget."""

    def __init__(self, seed: int, acceptance: Acceptance) -> None:
        self._seed, self._acceptance = _mixed(seed), acceptance
        self._known: dict[int, _Text] = {}

    def judge(self, seq_id: int, start: int, drafts: Sequence[int]) -> tuple[int, int]:
        """How many of the drafts from that position on are true, and the token that follows those."""
        stop = start + len(drafts) + 1
        true = self._text(seq_id, start, stop).tokens_of(start, stop)
        accepted = next((i for i, draft in enumerate(drafts) if draft != true[i]), len(drafts))
        return accepted, true[accepted]

    def guesses(self, seq_id: int, start: int, stop: int, *, depth: int) -> list[int]:
        """Draft tokens for the positions from `start` to `stop`, the first of which has that depth in its proposal."""
        text, at = self._text(seq_id, start, stop), self._acceptance.at
        places = range(start - text.first, stop - text.first)
        return [text.tokens[i] + (text.luck[i] >= at(d)) for d, i in enumerate(places, start=depth)]

    def nexts(self, seq_id: int, position: int, width: int, *, but: int | None) -> tuple[int, ...]:
        """The likeliest tokens of a position, as the draft ranks them once `but` is refused."""
        text = self._text(seq_id, position, position + 1)
        token, rank = text.tokens[position - text.first], text.ranks[position - text.first]
        ranked = range(token + 2, token + 2 + width)  # the wrong ones
        if rank >= width or token == but:
            return tuple(ranked)
        return (*ranked[:rank], token, *ranked[rank : width - 1])

    def forget(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._known.pop(seq_id, None)

    def _text(self, seq_id: int, start: int, stop: int) -> _Text:
        """Holds at least those positions."""
        text = self._known.get(seq_id)
        if text is None or text.first > start:
            text = self._known[seq_id] = _Text(_mixed(self._seed + seq_id), start)
        if text.stop < stop:
            text.extend(stop + _BLOCK, self._acceptance.ranks)
        return text


class _Text:
    """From the position on that was asked for first: what stands before, a prompt, nobody guesses."""

    __slots__ = ("_key", "first", "luck", "ranks", "tokens")

    def __init__(self, key: int, first: int) -> None:
        self._key, self.first = key, first
        self.tokens: list[int] = []
        self.luck: list[float] = []  # a draft token is right where this is below its chance
        self.ranks: list[int] = []  # of the true token among the draft's alternatives

    @property
    def stop(self) -> int:
        return self.first + len(self.tokens)

    def tokens_of(self, start: int, stop: int) -> list[int]:
        return self.tokens[start - self.first : stop - self.first]

    def extend(self, stop: int, shares: tuple[float, ...]) -> None:
        for position in range(self.stop, stop):
            drawn = _mixed(self._key + position)
            lucky = _mixed(drawn)
            self.tokens.append(drawn % _TRUE)
            self.luck.append(lucky / 2**64)
            rank = bisect_right(shares, _mixed(lucky) / 2**64)
            self.ranks.append(rank if rank < len(shares) else _NEVER)


def _mixed(key: int) -> int:
    """SplitMix64: neighbouring keys give unrelated numbers."""
    key = (key * _GOLDEN + _GOLDEN) & _BITS
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _BITS
    return key ^ (key >> 31)
