"""Report how far a long piece of work has come: a bar on a terminal, a line now and then elsewhere.

Knows nothing of the work.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_BAR_COLUMNS = 30
_POLL_S = 0.2
_LINE_EVERY_S = 5.0
_QUIET_S = 2.0
"""Work that is done by then prints nothing where there is no terminal."""


class ReportProgress(Protocol):
    """Callback that takes the stage, the share of it that is done and a note. It is cheap to call.

    The share runs from 0 to 1; None means that it is unknown.
    """

    def __call__(self, stage: str, share: float | None = None, note: str = "") -> None: ...


def no_progress(stage: str, share: float | None = None, note: str = "") -> None:
    """Ignore the report."""


@dataclass(frozen=True, slots=True)
class ProgressState:
    """Last report, with the names of `ReportProgress`."""

    stage: str
    share: float | None = None
    note: str = ""

    @property
    def line(self) -> str:
        """Stage, percentage and note, as far as they are known."""
        percent = [] if self.share is None else [f"{self.share:.0%}"]
        return ", ".join([self.stage, *percent, *([self.note] if self.note else [])])


class ProgressBar:
    """A `ReportProgress` and context manager. A thread draws, so seconds pass during the work.

    The bar is erased at the end. With `keeps` its last state remains as a line.
    """

    def __init__(self, out: IO[str], *, keeps: bool = False) -> None:
        self._console = Console(file=out, highlight=False, markup=False)
        self._keeps = keeps
        self._state = ProgressState("")
        self._bar = Progress(
            BarColumn(_BAR_COLUMNS),
            TextColumn("{task.description}, {task.elapsed:.0f} s", markup=False),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, visible=False)
        self._start = time.monotonic()
        self._ended = threading.Event()
        self._lines = threading.Thread(target=self._print_lines, name="progress", daemon=True)

    def __call__(self, stage: str, share: float | None = None, note: str = "") -> None:
        state = self._state = ProgressState(stage, share, note)
        total = None if share is None else 1.0
        self._bar.update(
            self._task, description=state.line, total=total, completed=share or 0.0, visible=True
        )

    def __enter__(self) -> ProgressBar:
        if self._console.is_interactive:
            self._bar.start()
        else:
            self._lines.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._console.is_interactive:
            self._bar.stop()
        else:
            self._lines.join()
        if self._keeps and self._state.stage:
            self._print(self._state)

    def _print_lines(self) -> None:
        """Print a line for each new stage, and one every few seconds within a stage."""
        printed, printed_at = "", self._start
        while not self._ended.wait(_POLL_S):
            state, now = self._state, time.monotonic()
            is_new = state.stage != printed or now - printed_at >= _LINE_EVERY_S
            if state.stage and is_new and now - self._start >= _QUIET_S:
                self._print(state)
                printed, printed_at = state.stage, now

    def _print(self, state: ProgressState) -> None:
        seconds = time.monotonic() - self._start
        self._console.print(f"{state.line}, {seconds:.0f} s", soft_wrap=True)
