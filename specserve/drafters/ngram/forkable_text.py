"""One text of a drafter, most of which it may share with its forks.

Knows no drafts, and requires of the text only that it grows and shrinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class TextBuffer(Protocol):
    """A text that grows and shrinks at its end."""

    tokens: list[int]

    def extend(self, tokens: Sequence[int]) -> None: ...
    def truncate(self, length: int) -> None: ...


class PlainText:
    """A text buffer of tokens without an index."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def truncate(self, length: int) -> None:
        del self.tokens[length:]


@dataclass(slots=True)
class SharedPrefix:
    """A text that several forks share.

    All of them have its first `base` tokens. After those it holds what one of them requested last.
    """

    text: TextBuffer
    base: int = 0
    num_users: int = 1


class ForkableText:
    """A prefix that is shared with forks, and tokens of its own after it.

    A fork copies only the latter, however long the text is.
    """

    __slots__ = ("_new_buffer", "_own", "_shared")

    def __init__(self, new_buffer: Callable[[], TextBuffer]) -> None:
        self._new_buffer, self._shared = new_buffer, SharedPrefix(new_buffer())
        self._own: list[int] = []

    def __len__(self) -> int:
        return self._shared.base + len(self._own)

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """Truncate the text to `start`, which is at most its length, and append the tokens."""
        assert start <= len(self)
        if start < self._shared.base:
            self._truncate_shared(start)
        self._own[start - self._shared.base :] = tokens

    def prefix(self, length: int) -> TextBuffer:
        """Return the shared buffer truncated or extended to `length` tokens.

        It is valid until any fork's next call. Tokens once requested may stay in it; only an
        earlier `write` shortens it.
        """
        shared = self._shared
        assert shared.base <= length <= len(self)
        wanted = self._own[: length - shared.base]
        shared.text.truncate(shared.base)
        shared.text.extend(wanted)
        if shared.num_users == 1:
            shared.base = length
            del self._own[: len(wanted)]
        return shared.text

    def fork(self, length: int) -> ForkableText:
        """Return another text with the same first `length` tokens.

        It is cheap unless a longer prefix was requested before.
        """
        other, base = ForkableText(self._new_buffer), self._shared.base
        if length < base:
            other._own = self._shared.text.tokens[:length]
        else:
            other._shared, other._own = self._shared, self._own[: length - base]
            self._shared.num_users += 1
        return other

    def release(self) -> None:
        """Stop using this text, so that the other forks share the prefix among themselves."""
        self._shared.num_users -= 1

    def _truncate_shared(self, length: int) -> None:
        """Truncate below the common prefix.

        If there are other forks, they keep the prefix, and this text starts another.
        """
        if self._shared.num_users == 1:
            self._shared.base, self._own = length, []
        else:
            self._shared.num_users -= 1
            self._own = self._shared.text.tokens[:length]
            self._shared = SharedPrefix(self._new_buffer())
