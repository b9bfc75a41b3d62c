"""How far a load has come, while it runs: a bar where there is a terminal, a line now and then where there is none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TextIO

_BAR = 30  # characters
_REDRAW_S, _LINE_S = 0.2, 5.0


class Progress:
    """Looks at the counts itself, so that whoever counts need not think of it."""

    def __init__(self, out: TextIO, *, total: int, done: Callable[[], int], tokens: Callable[[], int]) -> None:
        self._out, self._total, self._done, self._tokens = out, total, done, tokens
        self._draws = out.isatty()
        self._begun = time.monotonic()

    async def show(self) -> None:
        """Until cancelled; then once more, for good."""
        try:
            while True:
                self._write()
                await asyncio.sleep(_REDRAW_S if self._draws else _LINE_S)
        finally:
            self._write()
            if self._draws:
                self._out.write("\n")
                self._out.flush()

    def _write(self) -> None:
        self._out.write(f"\r\x1b[K{self._bar()} {self.line()}" if self._draws else self.line() + "\n")
        self._out.flush()

    def line(self) -> str:
        seconds = time.monotonic() - self._begun
        return f"{self._done()} of {self._total} requests, {self._tokens() / max(seconds, 1e-9):.0f} tokens/s, {seconds:.0f} s"

    def _bar(self) -> str:
        full = _BAR * self._done() // max(1, self._total)
        return "[" + "#" * full + "." * (_BAR - full) + "]"
