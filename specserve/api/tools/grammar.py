"""Write the grammar of an answer that must or may call tools, in Lark's notation for llguidance.

Knows no requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from specserve.api.tools.arguments import ArgumentStyle
from specserve.api.tools.formats import ModelCallFormat
from specserve.api.tools.keywords import keyword_rules
from specserve.api.tools.tags import tagged_rules

ANY_TEXT = r"/(.|\n)*/"


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
        lead = self._literal(self._format.answer_opening)
        return self._lark(
            f"start: {self._opening()} calls | {lead} answer", f"answer: %json {schema}"
        )

    def calls_or_text(self) -> str:
        """Return the grammar of free text up to the trigger, which calls must follow."""
        trigger, prefix = self._format.trigger, self._format.prefix
        if not trigger:
            other = rf"/([^{re.escape(prefix[0])}](.|\n)*)?/"
            return self._lark(f"start: {self._opening()} calls | TEXT", f"TEXT: {other}")
        if self._format.is_channel:
            lead = self._literal(self._format.answer_opening)
            return self._lark(f"start: {self._opening()} calls | {lead} TEXT", f"TEXT: {ANY_TEXT}")
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
        calls = [
            rule
            for i, (name, schema) in enumerate(self._functions)
            for rule in self._call(i, name, schema)
        ]
        choice = " | ".join(f"call_{i}" for i in range(len(self._functions)))
        postlude = self._optional(self._format.postlude)
        return "\n".join(
            (
                *start,
                f"calls: call {further} {self._literal(self._format.end)} {postlude}",
                f"call: {choice}",
                *calls,
            )
        )

    def _call(self, number: int, name: str, schema: str) -> list[str]:
        """Return the rules of calls of one function."""
        opening = self._literal(name + self._format.infix)
        suffix, rule = self._literal(self._format.suffix), f"arguments_{number}"
        if self._format.arguments is ArgumentStyle.JSON:
            return [f"call_{number}: {opening} %json {schema} {suffix}"]
        rules = (
            tagged_rules(rule, schema)
            if self._format.arguments is ArgumentStyle.TAGS
            else keyword_rules(rule, schema)
        )
        return [f"call_{number}: {opening} {rule} {suffix}", *rules]

    def _opening(self) -> str:
        return f"{self._optional(self._format.prelude)} {self._literal(self._format.prefix)}"

    def _optional(self, marker: str) -> str:
        """Return a marker that may be left out, and is only written if it is one token."""
        token = self._special_ids.get(marker)
        return "" if token is None else f"<[{token}]>?"

    def _literal(self, text: str) -> str:
        """Return text in quotes, with the ids of markers that are special tokens."""
        parts = [part for part in self._markers.split(text) if part]
        return " ".join(
            f"<[{self._special_ids[part]}]>" if part in self._special_ids else json.dumps(part)
            for part in parts
        )
