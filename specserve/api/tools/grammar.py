"""The grammar of an answer that calls functions, or may, in Lark's notation as llguidance reads it. Knows no requests."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from specserve.api.tools.formats import Spelling

ANY_TEXT, NO_BRACE_FIRST = r"/(.|\n)*/", r"/([^{](.|\n)*)?/"


class CallGrammar:
    """Made for one model's way of writing calls. `functions` are names, each with a JSON schema of its arguments."""

    def __init__(
        self, spelling: Spelling, functions: Sequence[tuple[str, str]], *, repeats: bool
    ) -> None:
        self._spelling, self._form = spelling, spelling.format
        self._markers = re.compile(
            "|".join(
                ["(" + "|".join(map(re.escape, spelling.special)) + ")"]
                if spelling.special
                else ["(?!)"]
            )
        )
        self._functions, self._repeats = functions, repeats and self._form.next is not None

    def calls_only(self) -> str:
        return self._text(f"start: {self._opening()} calls")

    def calls_or_json(self, schema: str) -> str:
        """Only where no JSON begins as calls do."""
        assert self._form.trigger
        return self._text(f"start: {self._opening()} calls | answer", f"answer: %json {schema}")

    def calls_or_text(self) -> str:
        """Free text, until it comes to the trigger; from there on it must be calls."""
        trigger, first = self._form.trigger, self._form.first
        if not trigger:
            return self._text(f"start: {self._opening()} calls | TEXT", f"TEXT: {NO_BRACE_FIRST}")
        if trigger in self._spelling.special:  # which no text can be mistaken for
            return self._text(f"start: TEXT | TEXT {self._opening()} calls", f"TEXT: {ANY_TEXT}")
        rest = self._literal(first.removeprefix(trigger))
        return self._text(
            f"start: TEXT | lead {rest} calls",
            f"lead[lazy]: TEXT {self._literal(trigger)}",
            f"TEXT: {ANY_TEXT}",
        )

    def _text(self, *start: str) -> str:
        again = (
            f"({self._literal(self._form.next)} call)*"
            if self._repeats and self._form.next is not None
            else ""
        )
        calls = [self._call(i, name, schema) for i, (name, schema) in enumerate(self._functions)]
        choice = " | ".join(f"call_{i}" for i in range(len(calls)))
        return "\n".join(
            (
                *start,
                f"calls: call {again} {self._literal(self._form.end)}",
                f"call: {choice}",
                *calls,
            )
        )

    def _call(self, number: int, name: str, schema: str) -> str:
        return f"call_{number}: {self._literal(name + self._form.middle)} %json {schema} {self._literal(self._form.after)}"

    def _opening(self) -> str:
        token = self._spelling.special.get(self._form.prelude)
        prelude = "" if token is None else f"<[{token}]>? "
        return prelude + self._literal(self._form.first)

    def _literal(self, text: str) -> str:
        """Quoted; markers that are tokens without a text by their ids."""
        parts = [part for part in self._markers.split(text) if part]
        return " ".join(
            f"<[{self._spelling.special[part]}]>"
            if part in self._spelling.special
            else json.dumps(part)
            for part in parts
        )
