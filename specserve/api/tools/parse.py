"""Parse an answer that may call tools, as it streams, into content and calls.

Knows formats, and no tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specserve.api.tools.formats import CallFormat

_JSON_MARK = re.compile(r'["\\{}\[\]]')


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of one call. The first has its id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


def merge_deltas(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """Return one delta for each call."""
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        earlier = calls.get(delta.index)
        calls[delta.index] = (
            delta
            if earlier is None
            else replace(earlier, arguments=earlier.arguments + delta.arguments)
        )
    return list(calls.values())


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


class CallParser:
    """Parser of one answer.

    The grammar guarantees the form of calls, so that searching for literal texts is enough.
    """

    def __init__(self, form: CallFormat, new_call_id: Callable[[], str] = new_call_id) -> None:
        self._format, self._new_call_id = form, new_call_id
        # The parser of what comes next; it returns True if another one goes on at once.
        self._parse: Callable[[], bool] = self._parse_text
        self._pending = ""  # text that is not parsed yet
        self._content = ""
        self._deltas: list[CallDelta] = []
        self._index = -1
        self._json_end = JsonEndFinder()
        self._is_start = True  # there was no content yet

    @property
    def has_complete_calls(self) -> bool:
        """True if there are calls and the last one has ended."""
        return self._index >= 0 and self._parse == self._parse_between_calls

    def push(self, text: str) -> tuple[str, tuple[CallDelta, ...]]:
        """Add text; return the new content, and at most one new delta of each call."""
        self._pending += text
        while self._parse():
            pass
        content, deltas = self._content, tuple(merge_deltas(self._deltas))
        self._content, self._deltas = "", []
        return content, deltas

    def finish(self) -> str:
        """Return content that was held back because it might have become a call.

        A call that was cut in its opening adds nothing.
        """
        rest, self._pending = self._pending, ""
        openings = tuple(filter(None, (self._format.trigger or "{", self._format.prelude)))
        return rest if self._parse == self._parse_text and not rest.startswith(openings) else ""

    def _parse_text(self) -> bool:
        openings = self._openings()
        for opening in openings:
            at = self._pending.find(opening)
            if at == 0 or (at > 0 and self._format.trigger):
                self._emit_content(at)
                self._pending = self._pending[len(opening) :]
                self._parse = self._parse_name
                return True
        self._emit_content(
            len(self._pending)
            - max((overlap(self._pending, opening) for opening in openings), default=0)
        )
        return False

    def _openings(self) -> tuple[str, ...]:
        """Return the texts that open a call; without a trigger it must begin the answer."""
        form = self._format
        if form.trigger:
            return (form.prefix,)
        return (
            (form.prefix, form.prelude + form.prefix)
            if self._is_start and _may_open(self._pending, form)
            else ()
        )

    def _emit_content(self, length: int) -> None:
        if length:
            self._content += self._pending[:length]
            self._pending = self._pending[length:]
            self._is_start = False

    def _parse_name(self) -> bool:
        name, infix, rest = self._pending.partition(self._format.infix)
        if not infix:
            return False
        self._index, self._pending = self._index + 1, rest
        self._json_end, self._parse = JsonEndFinder(), self._parse_arguments
        self._deltas.append(CallDelta(self._index, "", id=self._new_call_id(), name=name))
        return True

    def _parse_arguments(self) -> bool:
        end = self._json_end.find(self._pending)
        arguments, self._pending = (
            (self._pending, "") if end is None else (self._pending[:end], self._pending[end:])
        )
        if arguments:
            self._deltas.append(CallDelta(self._index, arguments))
        if end is None:
            return False
        self._parse = self._parse_between_calls
        return True

    def _parse_between_calls(self) -> bool:
        """Look for a further call, which alone may follow a call."""
        form = self._format
        opening = None if form.next_prefix is None else form.suffix + form.next_prefix
        if opening is None or not self._pending.startswith(opening):
            return False
        self._pending, self._parse = self._pending[len(opening) :], self._parse_name
        return True


class JsonEndFinder:
    """Search for the end of a JSON object in a text that arrives in parts."""

    def __init__(self) -> None:
        self._depth, self._in_quotes, self._escaped = 0, False, False

    def find(self, text: str) -> int | None:
        """Return the position behind the object's last brace; None if it goes on."""
        at = 0
        if self._escaped and text:
            self._escaped, at = False, 1
        while mark := _JSON_MARK.search(text, at):
            at = mark.end()
            if self._in_quotes:
                at += self._skip_in_string(mark[0], is_last=at == len(text))
            elif self._ends(mark[0]):
                return at
        return None

    def _skip_in_string(self, char: str, *, is_last: bool) -> int:
        """Return how many more characters to skip: the escaped one, or none."""
        self._in_quotes = char != '"'
        self._escaped = char == "\\" and is_last
        return int(char == "\\" and not is_last)

    def _ends(self, char: str) -> bool:
        self._in_quotes = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return not self._in_quotes and self._depth == 0


def _may_open(text: str, form: CallFormat) -> bool:
    return any(
        opening.startswith(text[: len(opening)])
        for opening in (form.prefix, form.prelude + form.prefix)
    )


def overlap(text: str, opening: str) -> int:
    """Return the length of the longest end of `text` that `opening` begins with."""
    return next(
        (
            length
            for length in range(min(len(text), len(opening) - 1), 0, -1)
            if opening.startswith(text[-length:])
        ),
        0,
    )
