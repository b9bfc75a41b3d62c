"""Simulated texts and draft tokens, as fixed functions of seed, sequence and position.

Nothing depends on the order of the calls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from specserve.config.fields import list_of, number, setting

VOCAB = 2**31
# The target's tokens lie below this; the numbers right above a token stand for wrong drafts of it.
_TRUE = 2**30
_BITS, _GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15
_BLOCK = 64  # positions drawn at a time
_UNRANKED = 2**31  # beyond all ranks of the profile


@dataclass(frozen=True, slots=True)
class AcceptanceConfig:
    """How good the draft is.

    The default ranks were measured on the demo pair, greedy; 5 to 7 are interpolated.
    """

    # Probability that a draft token is accepted if all before it were.
    alpha: float = setting(0.75, number(0, 1))
    # Alpha by position in the proposal; the last value holds for all further positions.
    by_position: tuple[float, ...] = setting((), list_of(number(0, 1)))
    # Share of rejections (or ends of the proposal) whose next token is among the draft's 1, 2, 3,
    # ... likeliest tokens there.
    ranks: tuple[float, ...] = setting(
        (0.59, 0.70, 0.76, 0.81, 0.83, 0.85, 0.865, 0.88), list_of(number(0, 1))
    )

    def at(self, depth: int) -> float:
        """Return alpha at a position of the proposal, counted from 0."""
        return (
            self.by_position[min(depth, len(self.by_position) - 1)]
            if self.by_position
            else self.alpha
        )


class AcceptanceModel:
    """The texts of one replica. Keeps what it has drawn of a sequence until its release."""

    def __init__(self, seed: int, acceptance: AcceptanceConfig) -> None:
        self._seed, self._acceptance = _mixed(seed), acceptance
        self._texts: dict[int, _Text] = {}

    def verify(self, seq_id: int, start: int, drafts: Sequence[int]) -> tuple[int, int]:
        """Return how many of the draft tokens from `start` on are accepted, and the next token."""
        stop = start + len(drafts) + 1
        true = self._text(seq_id, start, stop).tokens_of(start, stop)
        accepted = next((i for i, draft in enumerate(drafts) if draft != true[i]), len(drafts))
        return accepted, true[accepted]

    def draft_tokens(self, seq_id: int, start: int, stop: int, *, depth: int) -> list[int]:
        """Return draft tokens for the positions from `start` to `stop`.

        The first one stands at position `depth` of its proposal.
        """
        text, at = self._text(seq_id, start, stop), self._acceptance.at
        indices = range(start - text.first, stop - text.first)
        return [
            text.tokens[i] + (text.draws[i] >= at(d)) for d, i in enumerate(indices, start=depth)
        ]

    def likeliest(
        self, seq_id: int, position: int, width: int, *, but: int | None
    ) -> tuple[int, ...]:
        """Return the draft's likeliest tokens at a position once `but` is rejected there."""
        text = self._text(seq_id, position, position + 1)
        token, rank = text.tokens[position - text.first], text.ranks[position - text.first]
        ranked = range(token + 2, token + 2 + width)  # wrong tokens
        if rank >= width or token == but:
            return tuple(ranked)
        return (*ranked[:rank], token, *ranked[rank : width - 1])

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._texts.pop(seq_id, None)

    def _text(self, seq_id: int, start: int, stop: int) -> _Text:
        """Return the text of a sequence, drawn at least from `start` to `stop`."""
        text = self._texts.get(seq_id)
        if text is None or text.first > start:
            text = self._texts[seq_id] = _Text(_mixed(self._seed + seq_id), start)
        if text.stop < stop:
            text.extend(stop + _BLOCK, self._acceptance.ranks)
        return text


class _Text:
    """The text of a sequence from the first drafted position on, which follows its prompt."""

    __slots__ = ("_key", "draws", "first", "ranks", "tokens")

    def __init__(self, key: int, first: int) -> None:
        self._key, self.first = key, first
        self.tokens: list[int] = []
        self.draws: list[float] = []  # uniform; a draft token is right where this is below alpha
        self.ranks: list[int] = []  # rank of the target's token among the draft's alternatives

    @property
    def stop(self) -> int:
        return self.first + len(self.tokens)

    def tokens_of(self, start: int, stop: int) -> list[int]:
        return self.tokens[start - self.first : stop - self.first]

    def extend(self, stop: int, shares: tuple[float, ...]) -> None:
        for position in range(self.stop, stop):
            drawn = _mixed(self._key + position)
            uniform = _mixed(drawn)
            self.tokens.append(drawn % _TRUE)
            self.draws.append(uniform / 2**64)
            rank = bisect_right(shares, _mixed(uniform) / 2**64)
            self.ranks.append(rank if rank < len(shares) else _UNRANKED)


def _mixed(key: int) -> int:
    """Hash a key with SplitMix64, so that neighbouring keys give unrelated numbers."""
    key = (key * _GOLDEN + _GOLDEN) & _BITS
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _BITS
    return key ^ (key >> 31)
