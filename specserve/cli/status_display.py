"""Show the status that an application's board has, on a terminal or as lines, until it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

STATUS_EVERY_S = 10.0
REDRAW_EVERY_S = 1.0
ANSWER_TIMEOUT_S = 5.0
Ended = Callable[[], str | None]
"""Returns the name of a process of Ray that has ended, and the server with it."""


def example(url: str, model: str, *, is_chat: bool) -> tuple[str, ...]:
    """Return a command to try, in parts that a terminal of 80 columns holds."""
    own: dict[str, object] = {"prompt": "def read_lines(path):", "max_tokens": 48}
    if is_chat:
        own = {"messages": [{"role": "user", "content": "Hello"}]}
    path = "chat/completions" if is_chat else "completions"
    header, body = "-H 'Content-Type: application/json'", json.dumps({"model": model, **own})
    return f"curl {url}/v1/{path}", header, f"-d '{body}'"


def has_chat_template(url: str) -> bool:
    """Return whether the first model of a server is made for chats; False if it does not say."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_TIMEOUT_S)
    with suppress(OSError, HTTPException, ValueError, LookupError), closing(connection):
        connection.request("GET", f"{urlsplit(url).path}/v1/models")
        return bool(json.load(connection.getresponse())["data"][0]["chat_template"])
    return False


def print_status(board: Any, say: Callable[[str], None], ended: Ended) -> str:
    """Print a line of status now and then, when it has something new, until Ray has ended."""
    from specserve.cli.console import StatusLine

    status_line, due = StatusLine(), time.monotonic() + STATUS_EVERY_S
    while (process := ended()) is None:
        time.sleep(REDRAW_EVERY_S)
        if time.monotonic() < due:
            continue
        try:
            status = board.status.remote().result(timeout_s=ANSWER_TIMEOUT_S)
            line = status_line.next(status, time.monotonic())
        except Exception as error:  # the error is the status then
            line = f"no status: {type(error).__name__}"
        if line is not None:
            say(line)
        due = time.monotonic() + STATUS_EVERY_S
    return process


def draw_status(
    board: Any, console: Console, ended: Ended, *, title: str, hints: Sequence[str]
) -> str:
    """Draw a page of status again and again, until Ray has ended."""
    from rich.live import Live

    from specserve.cli.console import StatusScreen

    screen = StatusScreen(title=title, hints=hints)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while (process := ended()) is None:
            try:
                page = screen.render(board.status.remote().result(timeout_s=ANSWER_TIMEOUT_S))
            except Exception as error:  # the error is the status then
                page = screen.render(None, missing=type(error).__name__)
            live.update(page, refresh=True)
            time.sleep(REDRAW_EVERY_S)
    return process
