"""Conversion of GBNF, the notation of llama.cpp and xgrammar, to Lark's for llguidance.

A rule of GBNF matches characters. A lexeme of llguidance takes all that it can, so that
`[a-z]+ "a"` would never end. Therefore each lexeme is one character. It knows no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache

from specserve.errors import BadValue

ROOT = "root"
_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_SPACE, _SPACES = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:\s|#[^\r\n]*)*")
_BAR = re.compile(r"(?:\s|#[^\r\n]*)*\|")  # also at the beginning of a line, as xgrammar has it
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_REPEAT = re.compile(r"[*+?]|\{\s*(\d+)\s*(,?)\s*(\d*)\s*\}")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in '\\"[]-^/'}
MAX_NESTING = 64  # groups
MAX_WRITTEN = 64 * 1024
"""Characters in Lark's notation, some five for one of a literal; 65,000 took 0.13 s."""


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is in GBNF: no rule of Lark's has `::=`."""
    return _RULE.search(text) is not None


@lru_cache(maxsize=32)  # a request parses its grammar several times
def lark_from_gbnf(text: str) -> str:
    """Return the grammar in Lark's notation. Raises BadValue with the position of an error."""
    return _Converter(text).convert()


class _Converter:
    """A descent over the text, which writes Lark's notation as it reads."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth, self._written = text, 0, 0, 0
        self._numbers: dict[str, int] = {}  # of the rules that are named
        self._classes: dict[str, str] = {}  # rules of one character, by their expression

    def convert(self) -> str:
        rules: dict[str, str] = {}
        self._take(_SPACES)
        while self._at < len(self._text):
            name = self._name()
            self._take(_SPACE)
            if not self._has("::="):
                raise self._error("::= is missing")
            if name in rules:
                raise self._error(f"the rule {name} is there twice")
            self._take(_SPACES)
            rules[name] = self._alternatives()
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error(f"{self._text[self._at]!r} is not expected")
            self._take(_SPACES)
        missing = [name for name in (ROOT, *self._numbers) if name not in rules]
        if missing:
            raise BadValue(f"the grammar has no rule {missing[0]}", param="guided")
        return "\n".join(
            (
                f"start: {self._reference(ROOT)}",
                *(f"{self._reference(name)}: {rule}" for name, rule in rules.items()),
                *(f"{name}: {expression}" for expression, name in self._classes.items()),
            )
        )

    def _alternatives(self) -> str:
        alternatives = [self._sequence()]
        while self._take(_BAR):
            self._take(_SPACES)
            alternatives.append(self._sequence())
        return " | ".join(alternatives)

    def _sequence(self) -> str:
        return " ".join(self._items()) or '""'

    def _items(self) -> Iterator[str]:
        while (item := self._item()) is not None:
            repeat = self._take(_REPEAT)
            yield f"({item}){self._bounds(repeat)}" if repeat is not None else item
            self._skip()

    def _item(self) -> str | None:
        """Return one item of a sequence, or None at its end."""
        if self._has('"'):
            return " ".join(self._literal(char) for char in self._characters('"')) or '""'
        if self._has("["):
            return self._class()
        if self._has("."):
            return self._one_character(r"/(.|\n)/")
        if self._has("("):
            return self._group()
        start = self._at
        if self._take(_NAME) is None:
            return None
        return self._reference(self._text[start : self._at])

    def _group(self) -> str:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._error(f"groups are nested more than {MAX_NESTING} levels deep")
        self._take(_SPACES)
        inside = self._alternatives()
        if not self._has(")"):
            raise self._error(") is missing")
        self._depth -= 1
        return f"({inside})"

    def _class(self) -> str:
        negated = "^" if self._has("^") else ""
        ranges, characters = [], list(self._characters("]", ranges=True))
        while characters:
            first = last = characters.pop(0)
            if len(characters) > 1 and characters[0] is None:
                last = characters[1]
                del characters[:2]
            low, high = ("-" if char is None else char for char in (first, last))
            ranges.append(rf"\u{{{ord(low):x}}}-\u{{{ord(high):x}}}")
        if not ranges:
            raise self._error("an empty class matches nothing")
        return self._one_character(f"/[{negated}{''.join(ranges)}]/")

    def _characters(self, end: str, *, ranges: bool = False) -> Iterator[str | None]:
        """Yield characters up to `end`; with `ranges`, None for a hyphen that is not escaped."""
        while not self._has(end):
            char = self._text[self._at : self._at + 1]
            if char in ("", "\n", "\r"):
                raise self._error(f"{end} is missing")
            self._at += 1
            if char == "\\":
                yield self._escaped()
            else:
                yield None if ranges and char == "-" else char

    def _escaped(self) -> str:
        if (digits := self._take(_HEX)) is not None:
            code = int(digits[1] or digits[2] or digits[3], 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self._error(f"{code:#x} is no character")
            return chr(code)
        char = self._text[self._at : self._at + 1]
        if char not in _ESCAPES:
            raise self._error(rf"\{char} is no escape")
        self._at += 1
        return _ESCAPES[char]

    def _bounds(self, repeat: re.Match[str]) -> str:
        if repeat[1] is None:
            return repeat[0]
        return f"{{{repeat[1]},{repeat[3]}}}" if repeat[2] else f"{{{repeat[1]}}}"

    def _literal(self, char: str | None) -> str:
        written = json.dumps(char, ensure_ascii=False)
        self._written += len(written) + 1
        if self._written > MAX_WRITTEN:
            raise self._error("it is too long; match repeated text by rules and classes")
        return written

    def _one_character(self, expression: str) -> str:
        return self._classes.setdefault(expression, f"c{len(self._classes)}")

    def _reference(self, name: str) -> str:
        return f"r{self._numbers.setdefault(name, len(self._numbers))}"

    def _name(self) -> str:
        match = self._take(_NAME)
        if match is None:
            raise self._error("a rule must begin here, with its name and ::=")
        return match[0]

    def _skip(self) -> None:
        """Pass over spaces, and over lines within a group."""
        self._take(_SPACES if self._depth else _SPACE)

    def _has(self, text: str) -> bool:
        """Pass over the text if it is next, and return whether it was."""
        found = self._text.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match

    def _error(self, reason: str) -> BadValue:
        before = self._text[: self._at]
        line, column = before.count("\n") + 1, self._at - before.rfind("\n")
        return BadValue(
            f"the GBNF grammar is wrong at line {line}, column {column}: {reason}", param="guided"
        )
