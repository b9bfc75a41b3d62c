"""Formulas as MathML, which browsers draw themselves: a small part of LaTeX's notation, and a refusal of all the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape, unescape

from specserve.errors import SpecserveError

LETTERS = ("alpha", "beta", "gamma", "tau", "phi")
SIGNS = ("le", "ge", "ne", "lt", "sim", "approx", "mid", "in", "sum", "prod")
SYMBOLS = {name: unescape(f"&{name};") for name in (*LETTERS, *SIGNS)}  # HTML has these under the same names
SYMBOLS |= {"cdot": unescape("&sdot;"), "cdots": unescape("&ctdot;")}
LARGE = ("sum", "prod")  # what stands at their feet goes below them
WORDS = ("min", "max", "log")
TOKEN = re.compile(r"\\([A-Za-z]+|[,;{}])|(\d+(?:\.\d+)?)|([A-Za-z])|(\S)|\s+")
SPACES = {",": "0.17em", ";": "0.28em"}
MARKS = {"-": unescape("&minus;"), "'": unescape("&prime;")}


class BadFormula(SpecserveError):
    """A notation that is not among those drawn here."""


def mathml(source: str) -> str:
    """One displayed formula for each line."""
    return "\n".join(f'<math display="block"><mrow>{Formula(line).whole()}</mrow></math>' for line in source.strip().splitlines())


class Formula:
    """Reads one line from left to right."""

    def __init__(self, line: str) -> None:
        self._line, self._place = line, 0
        self._tokens: Sequence[re.Match[str]] = [found for found in TOKEN.finditer(line) if not found[0].isspace()]

    def whole(self) -> str:
        drawn = self._row(until=None)
        if self._place < len(self._tokens):
            raise BadFormula(f"a brace closes nothing in {self._line!r}")
        return drawn

    def _row(self, *, until: str | None) -> str:
        parts = []
        while self._place < len(self._tokens) and self._tokens[self._place][0] != "}":
            parts.append(self._scripted())
        if until is not None:
            self._take(until)
        return "".join(parts)

    def _scripted(self) -> str:
        """An atom with what hangs at it."""
        is_large = self._tokens[self._place][1] in LARGE
        base, scripts = self._atom(), {}
        while self._place < len(self._tokens) and (mark := self._tokens[self._place][0]) in ("_", "^"):
            self._place += 1
            scripts[mark] = self._atom()
        if not scripts:
            return base
        below, above = ("munder", "mover") if is_large else ("msub", "msup")
        tag = {"_": below, "^": above}[next(iter(scripts))] if len(scripts) == 1 else "munderover" if is_large else "msubsup"
        return f"<{tag}>{base}{scripts.get('_', '')}{scripts.get('^', '')}</{tag}>"

    def _atom(self) -> str:
        if self._place >= len(self._tokens):
            raise BadFormula(f"{self._line!r} ends where something must follow")
        token = self._tokens[self._place]
        self._place += 1
        command, number, letter, mark = token.groups()
        if command:
            return self._command(command)
        if number:
            return f"<mn>{number}</mn>"
        if letter:
            return f"<mi>{letter}</mi>"
        if mark == "{":
            return f"<mrow>{self._row(until='}')}</mrow>"
        return f"<mo>{escape(MARKS.get(mark, mark))}</mo>"

    def _command(self, name: str) -> str:
        if name == "frac":
            return f"<mfrac>{self._atom()}{self._atom()}</mfrac>"
        if name == "text":
            return f"<mtext>{escape(self._text())}</mtext>"
        if name in SPACES:
            return f'<mspace width="{SPACES[name]}"/>'
        if name in "{}":
            return f"<mo>{name}</mo>"
        if name in WORDS:
            return f"<mi>{name}</mi>"
        if name not in SYMBOLS:
            raise BadFormula(f"\\{name} in {self._line!r} is not among what is drawn here: {', '.join((*SYMBOLS, *WORDS, 'frac', 'text'))}")
        tag = "mi" if name in LETTERS else "mo"
        return f"<{tag}>{escape(SYMBOLS[name])}</{tag}>"

    def _text(self) -> str:
        """What stands between the braces, spaces included."""
        begin = self._take("{").end()
        while self._place < len(self._tokens) and self._tokens[self._place][0] != "}":
            self._place += 1
        return self._line[begin : self._take("}").start()]

    def _take(self, wanted: str) -> re.Match[str]:
        if self._place >= len(self._tokens) or self._tokens[self._place][0] != wanted:
            raise BadFormula(f"{wanted} is missing in {self._line!r}")
        self._place += 1
        return self._tokens[self._place - 1]
