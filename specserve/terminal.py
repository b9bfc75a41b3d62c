"""A stream that may be a terminal: its size, and the few codes by which a line or a screen is drawn again in place. Reads no environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

HOME, ERASE_LINE, ERASE_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
ENTER_PAGE, LEAVE_PAGE = (
    "\x1b[?1049h",
    "\x1b[?1049l",
)  # behind it, what was printed before stays as it is
PLAIN = "\x1b[0m"
RED, GREEN, YELLOW, BOLD, DIM = 31, 32, 33, 1, 2
USUAL = os.terminal_size((80, 24))


def bar(share: float, *, width: int) -> str:
    """Filled as far as the share says, 0 to 1."""
    full = round(width * min(1.0, max(0.0, share)))
    return "[" + "#" * full + "." * (width - full) + "]"


class Terminal:
    """Asks for the size whenever it draws, so that a window may change at any time."""

    def __init__(self, out: TextIO, *, colours: bool = False, dumb: bool = False) -> None:
        self.out, self._colours = out, colours and out.isatty()
        self.draws = out.isatty() and not dumb  # whether there is anybody to look

    def size(self) -> os.terminal_size:
        try:
            found = os.get_terminal_size(self.out.fileno())
        except (OSError, ValueError):  # no terminal, or none that tells
            return USUAL
        return found if found.columns and found.lines else USUAL

    def write(self, text: str) -> None:
        """At once, and whole."""
        self.out.write(text)
        self.out.flush()

    def paint(self, text: str, colour: int) -> str:
        """Or as it is, where colours are not wanted."""
        return f"\x1b[{colour}m{text}{PLAIN}" if self._colours and colour else text

    def redraw_line(self, line: str) -> None:
        self.write(f"\r{ERASE_LINE}{line[: self.size().columns - 1]}")

    @contextmanager
    def page(self) -> Iterator[None]:
        """A page of its own until the end, however that comes; then all is as it was."""
        self.write(ENTER_PAGE + HIDE_CURSOR)
        try:
            yield
        finally:
            self.write(SHOW_CURSOR + LEAVE_PAGE)

    def redraw_page(self, lines: Sequence[tuple[str, int]]) -> None:
        """Each with its colour, 0 for none. What does not fit is cut off."""
        columns, rows = self.size()
        shown = [
            self.paint(text[: columns - 1], colour) + ERASE_LINE for text, colour in lines[:rows]
        ]
        self.write(HOME + "\r\n".join(shown) + ERASE_BELOW)
