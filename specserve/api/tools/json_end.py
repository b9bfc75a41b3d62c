"""Find the end of a JSON object in a text that arrives in parts."""

from __future__ import annotations

import re

_JSON_MARK = re.compile(r'["\\{}\[\]]')


class JsonEndFinder:
    """Search for the end of a JSON object in a text that arrives in parts."""

    def __init__(self) -> None:
        self._depth, self._in_quotes, self._escaped = 0, False, False

    def find(self, text: str) -> int | None:
        """Return the position after the object's last brace; None if it goes on."""
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
