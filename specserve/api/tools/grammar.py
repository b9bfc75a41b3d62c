"""Write the grammar of an answer that must or may call tools, in Lark's notation for llguidance.

Knows no requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from specserve.api.tools.formats import ModelCallFormat

ANY_TEXT, NO_BRACE_FIRST = r"/(.|\n)*/", r"/([^{](.|\n)*)?/"


class CallGrammar:
    """Grammars of answers in one model's call format.

    `functions` are names, each with a JSON schema of its arguments; `parallel` allows several
    calls.
    """

    def __init__(
        self,
        call_format: ModelCallFormat,
        functions: Sequence[tuple[str, str]],
        *,
        parallel: bool,
    ) -> None:
        self._special_ids, self._format = call_format.special_ids, call_format.format
        self._markers = re.compile(
            "|".join(
                ["(" + "|".join(map(re.escape, self._special_ids)) + ")"]
                if self._special_ids
                else ["(?!)"]
            )
        )
        self._functions = functions
        self._parallel = parallel and self._format.next_prefix is not None

    def calls_only(self) -> str:
        return self._lark(f"start: {self._opening()} calls")

    def calls_or_json(self, schema: str) -> str:
        """Return the grammar of calls or of JSON; calls must not begin as JSON does."""
        assert self._format.trigger
        return self._lark(f"start: {self._opening()} calls | answer", f"answer: %json {schema}")

    def calls_or_text(self) -> str:
        """Return the grammar of free text up to the trigger, which calls must follow."""
        trigger, prefix = self._format.trigger, self._format.prefix
        if not trigger:
            return self._lark(f"start: {self._opening()} calls | TEXT", f"TEXT: {NO_BRACE_FIRST}")
        if trigger in self._special_ids:  # no text can be mistaken for a special token
            return self._lark(f"start: TEXT | TEXT {self._opening()} calls", f"TEXT: {ANY_TEXT}")
        rest = self._literal(prefix.removeprefix(trigger))
        return self._lark(
            f"start: TEXT | lead {rest} calls",
            f"lead[lazy]: TEXT {self._literal(trigger)}",
            f"TEXT: {ANY_TEXT}",
        )

    def _lark(self, *start: str) -> str:
        further = (
            f"({self._literal(self._format.next_prefix)} call)*"
            if self._parallel and self._format.next_prefix is not None
            else ""
        )
        calls = [self._call(i, name, schema) for i, (name, schema) in enumerate(self._functions)]
        choice = " | ".join(f"call_{i}" for i in range(len(calls)))
        return "\n".join(
            (
                *start,
                f"calls: call {further} {self._literal(self._format.end)}",
                f"call: {choice}",
                *calls,
            )
        )

    def _call(self, number: int, name: str, schema: str) -> str:
        opening, suffix = name + self._format.infix, self._format.suffix
        return f"call_{number}: {self._literal(opening)} %json {schema} {self._literal(suffix)}"

    def _opening(self) -> str:
        token = self._special_ids.get(self._format.prelude)
        prelude = "" if token is None else f"<[{token}]>? "
        return prelude + self._literal(self._format.prefix)

    def _literal(self, text: str) -> str:
        """Return text in quotes, with the ids of markers that are special tokens."""
        parts = [part for part in self._markers.split(text) if part]
        return " ".join(
            f"<[{self._special_ids[part]}]>" if part in self._special_ids else json.dumps(part)
            for part in parts
        )
