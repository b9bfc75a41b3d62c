"""Parse an answer that may call tools, as it streams, into content and calls.

Knows formats, and no tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specserve.api.tools.arguments import new_reader
from specserve.api.tools.formats import CallFormat
from specserve.api.tools.parameters import FunctionKinds
from specserve.api.tools.reader import MalformedArguments, overlap

_NAME = re.compile(r"[A-Za-z0-9_.-]*")


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

    The grammar guarantees the form of calls, so that searching for literal texts is enough. What
    has another form all the same is content; of a call that has begun, what follows its mistake.
    """

    def __init__(
        self,
        form: CallFormat,
        new_call_id: Callable[[], str] = new_call_id,
        *,
        kinds: FunctionKinds | None = None,
    ) -> None:
        self._format, self._new_call_id = form, new_call_id
        self._kinds = kinds or {}
        # The parser of what comes next; it returns True if another one goes on at once.
        self._parse: Callable[[], bool] = self._parse_text
        self._pending = ""  # text that is not parsed yet
        self._content = ""
        self._deltas: list[CallDelta] = []
        self._index = -1
        self._reader = new_reader(form.arguments, {})
        self._opening = ""  # of the call whose name comes next
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
        begin = self._format.trigger or self._format.prefix[0]
        openings = tuple(filter(None, (begin, self._format.prelude)))
        return rest if self._parse == self._parse_text and not rest.startswith(openings) else ""

    def _parse_text(self) -> bool:
        openings = self._openings()
        for opening in openings:
            at = self._pending.find(opening)
            if at == 0 or (at > 0 and self._format.trigger):
                self._emit_content(at)
                self._open(opening)
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

    def _open(self, opening: str) -> None:
        self._pending = self._pending[len(opening) :]
        self._opening, self._parse = opening, self._parse_name

    def _parse_name(self) -> bool:
        match = _NAME.match(self._pending)
        assert match is not None
        name, rest, infix = match[0], self._pending[match.end() :], self._format.infix
        if name and rest.startswith(infix):
            return self._begin_call(name, rest.removeprefix(infix))
        if infix.startswith(rest) and (name or not rest):
            return False
        self._pending = self._opening + self._pending
        self._parse = self._parse_rest
        return True

    def _begin_call(self, name: str, rest: str) -> bool:
        self._index, self._pending = self._index + 1, rest
        self._reader = new_reader(self._format.arguments, self._kinds.get(name, {}))
        self._parse = self._parse_arguments
        self._deltas.append(CallDelta(self._index, "", id=self._new_call_id(), name=name))
        return True

    def _parse_arguments(self) -> bool:
        try:
            arguments, self._pending = self._reader.read(self._pending)
        except MalformedArguments:
            self._parse = self._parse_rest
            return True
        if arguments:
            self._deltas.append(CallDelta(self._index, arguments))
        if not self._reader.has_ended:
            return bool(arguments) and bool(self._pending)
        self._parse = self._parse_between_calls
        return True

    def _parse_rest(self) -> bool:
        """Take what follows a malformed call as content."""
        self._emit_content(len(self._pending))
        return False

    def _parse_between_calls(self) -> bool:
        """Look for a further call, which alone may follow a call."""
        form = self._format
        opening = None if form.next_prefix is None else form.suffix + form.next_prefix
        if opening is None or not self._pending.startswith(opening):
            return False
        self._open(opening)
        return True


def _may_open(text: str, form: CallFormat) -> bool:
    return any(
        opening.startswith(text[: len(opening)])
        for opening in (form.prefix, form.prelude + form.prefix)
    )
