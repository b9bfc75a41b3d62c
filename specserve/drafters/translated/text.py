"""A sequence in the target's tokens, and how many of the draft's tokens spell each prefix of it.

Knows no model and no translation.
"""

from __future__ import annotations

from collections.abc import Sequence


class TranslatedText:
    """Tokens of the target, with the number of draft tokens up to the end of each.

    Inside a draft token that spells several of the target's tokens no draft token ends: there the
    number is None, and what was cached is of use only up to the last position that has one.
    """

    __slots__ = ("lengths", "tokens")

    def __init__(
        self, tokens: Sequence[int] = (), lengths: Sequence[int | None] | None = None
    ) -> None:
        self.tokens: list[int] = list(tokens)
        self.lengths: list[int | None] = [0] if lengths is None else list(lengths)
        """[tokens + 1]; the first is 0."""

    def __len__(self) -> int:
        return len(self.tokens)

    def last_boundary(self, length: int) -> tuple[int, int]:
        """Return the last position up to `length` where a draft token ends, in both numbers.

        They are the number of the target's tokens before it, and of the draft's.
        """
        position = length
        while (num_draft := self.lengths[position]) is None:
            position -= 1
        return position, num_draft

    def truncate(self, length: int) -> None:
        del self.tokens[length:], self.lengths[length + 1 :]

    def extend(self, tokens: Sequence[int], lengths: Sequence[int | None]) -> None:
        """Append tokens, with the number of draft tokens up to the end of each."""
        self.tokens += tokens
        self.lengths += lengths

    def fork(self, length: int) -> TranslatedText:
        """Return a copy of the first `length` tokens."""
        return TranslatedText(self.tokens[:length], self.lengths[: length + 1])
