"""How far a long piece of work has come: a bar on a terminal, a line now and then elsewhere. Knows nothing of the work."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TextIO

from specserve.terminal import Terminal, bar

_BAR = 30  # characters
_REDRAW_S, _LINE_S = 0.2, 5.0
_SHORT_S = 2.0  # work that is done by then is not talked about where there is no terminal


class Tell(Protocol):
    """What is under way, how much of it is done (0 to 1; None: nobody knows), and what else there is to say of it. Cheap to call."""

    def __call__(self, what: str, share: float | None = None, note: str = "") -> None: ...


def silent(what: str, share: float | None = None, note: str = "") -> None:
    """For those whom nobody asked."""


@dataclass(frozen=True, slots=True)
class State:
    """As `Tell` has it."""

    what: str
    share: float | None = None
    note: str = ""


class Bar:
    """A `Tell`, to be used in a `with`. A thread of its own draws, so that seconds pass on the screen whatever the work does meanwhile.

    It goes away at the end, unless it `keeps` its last state as a line.
    """

    def __init__(self, out: TextIO, *, keeps: bool = False) -> None:
        self._terminal, self._keeps = Terminal(out), keeps
        self._state = State("")
        self._begun = self._written = time.monotonic()
        self._last = ""  # stage that was written of
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)

    def __call__(self, what: str, share: float | None = None, note: str = "") -> None:
        self._state = State(what, share, note)

    def __enter__(self) -> Bar:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._terminal.draws:
            self._terminal.redraw_line("")
        if self._keeps and self._state.what:
            self._terminal.write(self._line(self._state) + "\n")

    def _draw(self) -> None:
        while not self._ended.wait(_REDRAW_S):
            state = self._state
            if not state.what:
                continue
            if self._terminal.draws:
                self._terminal.redraw_line(
                    f"{bar(state.share or 0.0, width=_BAR)} {self._line(state)}"
                )
            elif self._is_due(state, time.monotonic()):
                self._terminal.write(self._line(state) + "\n")
                self._last, self._written = state.what, time.monotonic()

    def _is_due(self, state: State, now: float) -> bool:
        if now - self._begun < _SHORT_S:
            return False
        return state.what != self._last or now - self._written >= _LINE_S

    def _line(self, state: State) -> str:
        percent = [] if state.share is None else [f"{state.share:.0%}"]
        return ", ".join(
            [
                state.what,
                *percent,
                *([state.note] if state.note else []),
                f"{time.monotonic() - self._begun:.0f} s",
            ]
        )
