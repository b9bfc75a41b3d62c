"""A sequence in the target's tokens, and how many of the draft's tokens spell each prefix of it.

Knows no model and no translation.
"""

from __future__ import annotations

from collections.abc import Sequence


class TranslatedText:
    """Tokens of the target, with the number of draft tokens up to the end of each."""

    __slots__ = ("lengths", "tokens")

    def __init__(self, tokens: Sequence[int] = (), lengths: Sequence[int] = (0,)) -> None:
        self.tokens = list(tokens)
        self.lengths = list(lengths)
        """[tokens + 1]; the first is 0."""

    def __len__(self) -> int:
        return len(self.tokens)

    def truncate(self, length: int) -> None:
        del self.tokens[length:], self.lengths[length + 1 :]

    def extend(self, tokens: Sequence[int], lengths: Sequence[int]) -> None:
        """Append tokens, with the number of draft tokens up to the end of each."""
        self.tokens += tokens
        self.lengths += lengths

    def fork(self, length: int) -> TranslatedText:
        """Return a copy of the first `length` tokens."""
        return TranslatedText(self.tokens[:length], self.lengths[: length + 1])
