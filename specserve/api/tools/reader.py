"""Read arguments that are not written as JSON, step by step as their text streams.

Knows no styles of their own: tags and keywords build on it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable


class MalformedArguments(ValueError):
    """A text that is no arguments in its style."""


class StepReader:
    """A reader in steps, each of which takes what it can of the text."""

    def __init__(self) -> None:
        self.has_ended = False
        self._pending = self._json = ""
        self._num_read = 0  # arguments
        self._step: Callable[[], bool] = self._read_key  # it returns True if another goes on

    def read(self, pending: str) -> tuple[str, str]:
        self._pending = pending
        try:
            while self._step():
                pass
        except MalformedArguments:
            if not self._json:
                raise
            self._step = self._fail  # what came before it is shown first
        written, self._json = self._json, ""
        return written, self._pending

    def _read_key(self) -> bool:
        raise NotImplementedError

    def _fail(self) -> bool:
        raise MalformedArguments

    def _take(self, length: int) -> str:
        taken, self._pending = self._pending[:length], self._pending[length:]
        return taken

    def _open(self, key: str) -> None:
        """Write an argument's name."""
        self._json += (", " if self._num_read else "{") + json.dumps(key) + ": "
        self._num_read += 1

    def _close(self) -> bool:
        self._json += "}" if self._num_read else "{}"
        self.has_ended = True
        return False


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


def literal(text: str) -> str | None:
    """Return a value in JSON, whether it was written so or in Python; None if it is neither."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _refuse_constant(name: str) -> object:
    raise ValueError(name)


def escape(text: str) -> str:
    """Return a text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
