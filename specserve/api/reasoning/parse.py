"""Parse an answer that begins with reasoning, as it streams, into reasoning and content.

No part of a marker is ever shown. Line breaks beside a marker belong to it. Knows no tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from specserve.api.reasoning.formats import FORMATS, PromptReasoning, PromptState
from specserve.api.tools.formats import FORMATS as CALL_FORMATS
from specserve.api.tools.reader import overlap

_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_CALLS = CALL_FORMATS["harmony"]
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


class ReasoningParser(Protocol):
    """A parser of one answer."""

    is_reasoning: bool  # what comes next is reasoning, as far as is known

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return the new reasoning and the new content."""
        ...

    def finish(self) -> tuple[str, str]:
        """Return what was held back because it might have become a marker."""
        ...


class ThinkParser:
    """Parser of one answer whose reasoning stands between two markers."""

    def __init__(self, state: PromptState) -> None:
        self._opening, self._closing = FORMATS["think"].opening, FORMATS["think"].closing
        self.is_reasoning = state is PromptState.OPEN
        self._is_start = state is PromptState.OPTIONAL  # the opening marker may still come
        self._skips_breaks = state is PromptState.OPEN
        self._pending = ""

    def push(self, text: str) -> tuple[str, str]:
        self._pending += text
        if self._is_start and not self._open():
            return "", ""
        reasoning = self._take_reasoning() if self.is_reasoning else ""
        return reasoning, "" if self.is_reasoning else self._take(len(self._pending))

    def finish(self) -> tuple[str, str]:
        rest, self._pending = self._pending, ""
        return (rest.rstrip("\n"), "") if self.is_reasoning else ("", rest)

    def _open(self) -> bool:
        """Look for the opening marker; return False while it may still come."""
        begin = self._pending.lstrip()
        if begin.startswith(self._opening):
            self._pending = begin[len(self._opening) :]
            self.is_reasoning = self._skips_breaks = True
        elif self._opening.startswith(begin):
            return False
        self._is_start = False
        return True

    def _take_reasoning(self) -> str:
        end = self._pending.find(self._closing)
        if end < 0:
            held = overlap(self._pending, self._closing)
            shown = self._pending[: len(self._pending) - held]
            return self._take(len(shown.rstrip("\n")))
        reasoning = self._take(end).rstrip("\n")
        self._pending = self._pending.removeprefix(self._closing)
        self.is_reasoning, self._skips_breaks = False, True
        return reasoning

    def _take(self, length: int) -> str:
        taken, self._pending = self._pending[:length], self._pending[length:]
        if self._skips_breaks:
            taken = taken.lstrip("\n")
            self._skips_breaks = not taken
        return taken


class HarmonyParser:
    """Parser of one answer in harmony's messages, each of a channel.

    `analysis` is reasoning. A call of a function becomes content in the format of calls, where a
    parser of calls expects it; without `has_calls` it is content as it stands.
    """

    def __init__(self, *, has_calls: bool) -> None:
        self.is_reasoning = False
        self._has_calls = has_calls
        self._pending = ""
        self._parse: Callable[[], bool] = self._parse_header
        self._reasoning = self._content = ""

    def push(self, text: str) -> tuple[str, str]:
        self._pending += text
        while self._parse():
            pass
        return self._flush()

    def finish(self) -> tuple[str, str]:
        """Return the rest; a header that was cut adds nothing."""
        if self._parse == self._parse_body or not self._pending.startswith("<|"):
            self._emit(len(self._pending))
        return self._flush()

    def _flush(self) -> tuple[str, str]:
        flushed = self._reasoning, self._content
        self._reasoning = self._content = ""
        return flushed

    def _parse_header(self) -> bool:
        header, message, rest = self._pending.partition("<|message|>")
        if not message:
            return False
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self.is_reasoning = channel is not None and channel[1] == "analysis" and recipient is None
        if recipient is not None and self._has_calls:
            self._content += _CALLS.prefix + recipient[1] + _CALLS.infix
        self._pending, self._parse = rest, self._parse_body
        return True

    def _parse_body(self) -> bool:
        ends = [at for end in _ENDS if (at := self._pending.find(end)) >= 0]
        if not ends:
            self._emit(len(self._pending) - max(overlap(self._pending, end) for end in _ENDS))
            return False
        self._emit(min(ends))
        self.is_reasoning, self._parse = False, self._parse_header
        return True

    def _emit(self, length: int) -> None:
        text, self._pending = self._pending[:length], self._pending[length:]
        if self.is_reasoning:
            self._reasoning += text
        else:
            self._content += text


def new_parser(reasoning: PromptReasoning, *, has_calls: bool) -> ReasoningParser:
    """Return the parser of the answer to a prompt; with `has_calls` it may call tools."""
    if reasoning.model.format.has_channels:
        return HarmonyParser(has_calls=has_calls)
    return ThinkParser(reasoning.state)
