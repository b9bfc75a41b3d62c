"""Arguments as Python's keywords: their grammar, and a reader that turns them into JSON."""

from __future__ import annotations

import json
import re
from itertools import count
from string import hexdigits

from specserve.api.tools.parameters import Parameter, parse_parameters
from specserve.api.tools.reader import MalformedArguments, StepReader, escape, literal

_KEYWORD = re.compile(r"\s*([A-Za-z0-9_.$-]+)\s*=")
_KEYWORD_BEGIN = re.compile(r"\s*[A-Za-z0-9_.$-]*\s*")
_WORD = re.compile(r"[A-Za-z0-9_.+-]+")
_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
MAX_CODE = 0x10FFFF  # of a character
_CLOSING = {"[": "]", "{": "}"}


def keyword_rules(rule: str, schema: str) -> list[str]:
    """Return rules of arguments as Python's keywords, with commas between them.

    `first` begins with the first argument that is written, and `rest` goes on after one.
    """
    parameters = parse_parameters(schema)
    rules = [f"{rule}: {rule}_first_0"]
    for i, one in zip(count(), parameters):
        rest, optional = f"{rule}_rest_{i + 1}", f" | {rule}_first_{i + 1}"
        further = f'", " {rule}_{i} {rule}_rest_{i + 1}'
        rules += [
            f"{rule}_first_{i}: {rule}_{i} {rest}" + ("" if one.is_required else optional),
            f"{rule}_rest_{i}: {further}" + ("" if one.is_required else f" | {rest}"),
            f"{rule}_{i}: {json.dumps(one.name + '=')} ({_keyword_value(one)})",
        ]
    end = len(parameters)
    return [*rules, f'{rule}_first_{end}: ""', f'{rule}_rest_{end}: ""']


def _keyword_value(parameter: Parameter) -> str:
    """Return the grammar of a value: JSON, but for Python's own words where they stand alone."""
    if parameter.is_boolean:
        return '"True" | "False"'
    return parameter.json_grammar + (' | "None"' if parameter.admits_null else "")


class KeywordsReader(StepReader):
    """Reader of Python's keyword arguments, up to the bracket after the last."""

    def __init__(self) -> None:
        super().__init__()
        self._brackets: list[str] = []  # closing ones that must still come
        self._quote = ""
        self._has_value = False

    def _read_key(self) -> bool:
        if self._pending.lstrip().startswith(")"):
            self._pending = self._pending.lstrip()
            return self._close()
        key = _KEYWORD.match(self._pending)
        if key is None:
            if not _KEYWORD_BEGIN.fullmatch(self._pending):
                raise MalformedArguments
            return False
        self._take(key.end())
        self._open(key[1])
        self._has_value, self._step = False, self._read_value
        return True

    def _read_value(self) -> bool:
        if not self._pending:
            return False
        char = self._pending[0]
        if not self._brackets and char in ",)":
            return self._end_value(char)
        if char.isspace() or (self._brackets and char in ",:"):
            self._json += self._take(1) if self._brackets else self._take(1)[:0]
            return True
        if self._has_value and not self._brackets:
            raise MalformedArguments
        if char in "\"'":
            self._json += '"'
            self._quote, self._step = self._take(1), self._read_string
            return True
        return self._read_bracket(char) if char in "[]{}" else self._read_word()

    def _end_value(self, char: str) -> bool:
        if not self._has_value:
            raise MalformedArguments
        self._take(char == ",")
        self._step = self._read_key
        return True

    def _read_bracket(self, char: str) -> bool:
        if char in _CLOSING:
            self._brackets.append(_CLOSING[char])
        elif not self._brackets or self._brackets.pop() != char:
            raise MalformedArguments
        self._json += self._take(1)
        self._has_value = True
        return True

    def _read_word(self) -> bool:
        word = _WORD.match(self._pending)
        if word is None:
            raise MalformedArguments
        if word.end() == len(self._pending):
            return False
        value = literal(word[0])
        if value is None:
            raise MalformedArguments
        self._take(word.end())
        self._json += value
        self._has_value = True
        return True

    def _read_string(self) -> bool:
        plain = _PLAIN[self._quote].match(self._pending)
        if plain is not None:
            self._json += escape(self._take(plain.end()))
        if not self._pending:
            return False
        if self._pending[0] == self._quote:
            self._take(1)
            self._json += '"'
            self._has_value, self._step = True, self._read_value
            return True
        return self._read_escape()

    def _read_escape(self) -> bool:
        kind = self._pending[1:2]
        length = 2 + _HEX_DIGITS.get(kind, 0)
        if len(self._pending) < length:
            return False
        self._json += _json_escape(kind, self._pending[2:length])
        self._take(length)
        return True


def _json_escape(kind: str, digits: str) -> str:
    r"""Return the escape in JSON of one in Python, `\` with `kind` and `digits`."""
    if kind in _HEX_DIGITS:
        if set(digits) - set(hexdigits) or int(digits, 16) > MAX_CODE:
            raise MalformedArguments
        return "\\u" + digits if kind == "u" else escape(chr(int(digits, 16)))
    if kind in 'nrtbf"\\/':
        return "\\" + kind
    known = {"'": "'", "\n": "", "a": "\a", "v": "\v", "0": "\0"}
    return escape(known.get(kind, "\\" + kind))
