"""Reads an answer that may call functions, as it streams: text comes out as content, calls come out in pieces. Knows formats, and no tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specserve.api.tools.formats import Format

_TELLING = re.compile(r'["\\{}\[\]]')


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of one call. The first has its id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


def joined(pieces: Sequence[CallPiece]) -> list[CallPiece]:
    """One for each call."""
    calls: dict[int, CallPiece] = {}
    for piece in pieces:
        begun = calls.get(piece.index)
        calls[piece.index] = (
            piece if begun is None else replace(begun, arguments=begun.arguments + piece.arguments)
        )
    return list(calls.values())


def fresh_id() -> str:
    return "call_" + secrets.token_hex(12)


class Calls:
    """One answer. What it must be is the grammar's to force, so that literal texts are enough to read it by."""

    def __init__(self, form: Format, fresh_id: Callable[[], str] = fresh_id) -> None:
        self._format, self._fresh_id = form, fresh_id
        self._read: Callable[[], bool] = self._text  # what comes now; True: it went on from it
        self._held = ""  # read by nobody yet
        self._content = ""
        self._pieces: list[CallPiece] = []
        self._index = -1
        self._json = JsonEnd()
        self._is_first = True  # nothing was shown as content

    @property
    def called(self) -> bool:
        """Whether there are calls, and none is left unfinished."""
        return self._index >= 0 and self._read == self._between

    def push(self, text: str) -> tuple[str, tuple[CallPiece, ...]]:
        """Content, and what there is of calls: at most one piece of each."""
        self._held += text
        while self._read():
            pass
        content, pieces = self._content, tuple(joined(self._pieces))
        self._content, self._pieces = "", []
        return content, pieces

    def finish(self) -> str:
        """Content that was held back, since it might have become a call. Of a call that was cut in its opening nothing is shown."""
        held, self._held = self._held, ""
        beginnings = tuple(filter(None, (self._format.trigger or "{", self._format.prelude)))
        return held if self._read == self._text and not held.startswith(beginnings) else ""

    def _text(self) -> bool:
        openings = self._openings()
        for opening in openings:
            at = self._held.find(opening)
            if at == 0 or (at > 0 and self._format.trigger):
                self._show(at)
                self._held = self._held[len(opening) :]
                self._read = self._name
                return True
        self._show(
            len(self._held)
            - max((_overlap(self._held, opening) for opening in openings), default=0)
        )
        return False

    def _openings(self) -> tuple[str, ...]:
        """Where the format has no trigger, a call stands at the beginning or nowhere."""
        form = self._format
        if form.trigger:
            return (form.first,)
        return (
            (form.first, form.prelude + form.first)
            if self._is_first and _may_open(self._held, form)
            else ()
        )

    def _show(self, length: int) -> None:
        if length:
            self._content, self._held, self._is_first = (
                self._content + self._held[:length],
                self._held[length:],
                False,
            )

    def _name(self) -> bool:
        name, middle, rest = self._held.partition(self._format.middle)
        if not middle:
            return False
        self._index, self._held, self._json, self._read = (
            self._index + 1,
            rest,
            JsonEnd(),
            self._arguments,
        )
        self._pieces.append(CallPiece(self._index, "", id=self._fresh_id(), name=name))
        return True

    def _arguments(self) -> bool:
        end = self._json.find(self._held)
        arguments, self._held = (
            (self._held, "") if end is None else (self._held[:end], self._held[end:])
        )
        if arguments:
            self._pieces.append(CallPiece(self._index, arguments))
        if end is None:
            return False
        self._read = self._between
        return True

    def _between(self) -> bool:
        """Nothing but further calls follows a call."""
        form = self._format
        opening = None if form.next is None else form.after + form.next
        if opening is None or not self._held.startswith(opening):
            return False
        self._held, self._read = self._held[len(opening) :], self._name
        return True


class JsonEnd:
    """Finds where an object ends, however it is cut."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def find(self, text: str) -> int | None:
        """The place behind its last brace; None: it goes on."""
        at = 0
        if self._escaped and text:
            self._escaped, at = False, 1
        while telling := _TELLING.search(text, at):
            at = telling.end()
            if self._quoted:
                at += self._in_string(telling[0], is_last=at == len(text))
            elif self._ends(telling[0]):
                return at
        return None

    def _in_string(self, char: str, *, is_last: bool) -> int:
        """How many characters more are passed over."""
        self._quoted = char != '"'
        self._escaped = char == "\\" and is_last
        return int(char == "\\" and not is_last)

    def _ends(self, char: str) -> bool:
        self._quoted = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return not self._quoted and self._depth == 0


def _may_open(held: str, form: Format) -> bool:
    return any(
        opening.startswith(held[: len(opening)])
        for opening in (form.first, form.prelude + form.first)
    )


def _overlap(text: str, opening: str) -> int:
    """The length of the longest end of `text` that `opening` begins with."""
    return next(
        (
            length
            for length in range(min(len(text), len(opening) - 1), 0, -1)
            if opening.startswith(text[-length:])
        ),
        0,
    )
