"""Turn token ids into text as they stream, up to a stop string. Knows no tokenizer library."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

_CONTEXT = 4
"""Tokens before the first one in which its character may begin: the longest character in bytes."""


class TokenTexts(Protocol):
    """The texts of single tokens, as a Tokenizer has them."""

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes: ...
    def token_name(self, token_id: int) -> str: ...
    def has_text(self, token_id: int) -> bool: ...


class IncrementalDetokenizer:
    """The text of one continuation, as its tokens arrive.

    It never emits a part of a character or of a stop string. `prefix_ids` are the tokens before
    the first one, which then does not begin a text. Special tokens in `visible_ids` appear by
    their names. A stop string that the first `min_tokens` tokens complete is text, as in vLLM. If
    it `includes_stop`, the text ends with the stop string.
    """

    def __init__(
        self,
        tokenizer: TokenTexts,
        prefix_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        visible_ids: Collection[int] = (),
        includes_stop: bool = False,
    ) -> None:
        self.hit_stop_string = False
        self.stop_string: str | None = None  # that ended the text
        # Tokens pushed until now; after a stop string, up to the one that completed it.
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._stop, self._visible_ids = tuple(stop), visible_ids
        self._min_tokens = min_tokens
        self._includes_stop = includes_stop
        # Characters that may be the beginning of a stop string.
        self._max_partial_stop = max(map(len, self._stop), default=1) - 1
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = not any(tokenizer.has_text(token) for token in prefix_ids)
        for token in prefix_ids[-_CONTEXT:]:
            self._utf8.decode(tokenizer.token_bytes(token))
        self._pending = ""  # text that is not emitted yet

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that can be emitted now."""
        for token in token_ids:
            if self.hit_stop_string:
                return ""
            self.num_tokens += 1
            if self._append(self._utf8.decode(self._token_bytes(token))):
                return self._emit(len(self._pending))
        held = self._partial_stop_length() if self._stop else 0
        return self._emit(len(self._pending) - held)

    def finish(self) -> str:
        """Return the rest of the text, when no more tokens will come."""
        if not self.hit_stop_string:
            self._append(self._utf8.decode(b"", final=True))
        return self._emit(len(self._pending))

    def _token_bytes(self, token: int) -> bytes:
        if self._at_start and self._tokenizer.has_text(token):
            self._at_start = False
            return self._tokenizer.token_bytes(token, first=True)
        return (
            self._tokenizer.token_name(token).encode()
            if token in self._visible_ids
            else self._tokenizer.token_bytes(token)
        )

    def _append(self, text: str) -> bool:
        """Add text, cut off at a stop string; return True if there was one."""
        length = len(self._pending)  # no stop string ends before it
        self._pending += text
        if self._stop and text and self.num_tokens > self._min_tokens:
            found = [
                (at + len(stop), at)
                for stop in self._stop
                if (at := self._pending.find(stop, max(0, length + 1 - len(stop)))) >= 0
            ]
            if found:
                # The first to be complete; of several that end together, the longest.
                end, at = min(found)
                self.hit_stop_string, self.stop_string = True, self._pending[at:end]
                self._pending = self._pending[: end if self._includes_stop else at]
        return self.hit_stop_string

    def _emit(self, num_chars: int) -> str:
        emitted, self._pending = self._pending[:num_chars], self._pending[num_chars:]
        return emitted

    def _partial_stop_length(self) -> int:
        """Return the length of the longest end of the text that a stop string begins with."""
        for length in range(min(self._max_partial_stop, len(self._pending)), 0, -1):
            end = self._pending[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
