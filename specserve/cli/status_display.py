"""Show the status that an application's board has, on a terminal or as lines, until interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

STATUS_EVERY_S = 10.0
REDRAW_EVERY_S = 1.0
ANSWER_TIMEOUT_S = 5.0


def print_status(board: Any, say: Callable[[str], None]) -> None:
    """Print a line of status now and then, when it has something new."""
    from specserve.cli.console import StatusLine

    status_line = StatusLine()
    while True:
        time.sleep(STATUS_EVERY_S)
        try:
            status = board.status.remote().result(timeout_s=ANSWER_TIMEOUT_S)
            line = status_line.next(status, time.monotonic())
        except Exception as error:  # the error is the status then
            line = f"no status: {type(error).__name__}"
        if line is not None:
            say(line)


def draw_status(board: Any, console: Console, *, title: str, hints: Sequence[str]) -> None:
    """Draw a page of status again and again."""
    from rich.live import Live

    from specserve.cli.console import StatusScreen

    screen = StatusScreen(title=title, hints=hints)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                page = screen.render(board.status.remote().result(timeout_s=ANSWER_TIMEOUT_S))
            except Exception as error:  # the error is the status then
                page = screen.render(None, missing=type(error).__name__)
            live.update(page, refresh=True)
            time.sleep(REDRAW_EVERY_S)
