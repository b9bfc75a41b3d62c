"""Run `specserve serve`: join or start Ray, deploy, show the status, and take everything down."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

from rich.console import Console

from specserve.cli.start import INTERRUPTED, quick_exit
from specserve.cli.status_display import draw_status, example, has_chat_template, print_status
from specserve.cluster.checkpoint_check import checkpoint_check
from specserve.cluster.cluster_address import require_answer, resolve
from specserve.cluster.launch import INDENT, Say, deploy, handle
from specserve.cluster.preflight import require_possible_here, require_serve
from specserve.cluster.ray_guard import RayGuard
from specserve.cluster.ray_session import ray_session, require_free_port
from specserve.config.hub_models import unpinned_models
from specserve.config.tree import Config
from specserve.models.checkpoints.store import remove_unused_weights
from specserve.progress import ProgressBar

ENDING = (signal.SIGINT, signal.SIGTERM)
END_WITHIN_S = 10.0
"""Time to stop in order, which takes 4 s, since calls of a Ray that has ended wait for it."""
DYING_S = 0.2
"""Time in which a process of Ray that was killed ends."""


def serve_until_ended(
    config: Config,
    say: Say,
    console: Console,
    *,
    join: str | None = None,
    replace: bool = False,
    may_wait: bool = False,
    notice: str | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM, then remove everything that was started.

    `join` is the address of a Ray cluster; without it a Ray of our own starts. On a terminal it
    draws a page of status; elsewhere it prints a line now and then. The `notice` is said once
    nothing stands in the way.
    """
    _check_first(config, say, join=join)
    is_ready = threading.Event()
    with contextlib.ExitStack() as limit, contextlib.ExitStack() as stack:
        require_checkpoints = stack.enter_context(checkpoint_check(config))
        stack.callback(remove_unused_weights)
        with _start_progress(say, console) as report:
            guard = stack.enter_context(ray_session(config, report, join=join, may_wait=may_wait))
            if guard is not None:
                limit.enter_context(_limited_end(guard, is_ready))
            for line in (notice, *(part.demo.note for part in config.each_model)):
                if line is not None:
                    report(line)
            stack.enter_context(_signals_as_interrupts())
            url = stack.enter_context(
                deploy(
                    config,
                    report,
                    owns_ray=guard is not None,
                    replace=replace,
                    may_wait=may_wait,
                    require=require_checkpoints,
                )
            )
        is_ready.set()
        ended = _show_status(config, url, say, console, guard)
        if guard is not None and ended is not None:
            _end_without_ray(guard, ended)
        say("stopping")


def _check_first(config: Config, say: Say, *, join: str | None) -> None:
    """Say what is not pinned, and raise if there is no place to serve at, or for what is served.

    Call it before the fork server starts, which holds this process's output until its imports are
    done.
    """
    for model in unpinned_models(config):
        say(f"warning: {model}")
    require_serve()
    if join is None:
        require_free_port(config)
        require_possible_here(config)
    else:
        require_answer(resolve(join))


@contextlib.contextmanager
def _start_progress(say: Say, console: Console) -> Iterator[Say]:
    """Yield a function that reports progress.

    On a terminal the states of deployments, which are indented, share one line with the seconds.
    """
    if not console.is_interactive:
        yield say
        return
    states: dict[str, str] = {}  # of the deployments that have been reported
    with ProgressBar(console.file) as bar:

        def report(line: str) -> None:
            if not line.startswith(INDENT):
                say(line)
                bar(line)
                return
            name, _, state = line.strip().partition(": ")
            states[name] = state
            bar(", ".join(f"{name} {state}" for name, state in states.items()))

        yield report


@contextlib.contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT, and on the first SIGTERM.

    Enter this once Ray has installed its own handlers. SIGINT is included because a shell that
    starts us in the background ignores it. `timeout` sends SIGTERM twice, to us and to our group;
    the second would interrupt what the first has begun.
    """

    def interrupt(number: int, frame: object) -> None:
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_status(
    config: Config, url: str, say: Say, console: Console, guard: RayGuard | None
) -> str | None:
    """Say that the server is ready, and show its status until the process is interrupted.

    Returns the name of a process of our own Ray if that has ended.
    """
    names = [part.model for part in config.each_model]
    board = handle(config, "Board")
    command = example(url, names[0], is_chat=has_chat_template(url))
    # A reader of "ready" may end this process at once.
    with contextlib.suppress(KeyboardInterrupt):
        say(f"ready {url}")
        say(" ".join(command))
        ended = (lambda: None) if guard is None else guard.ended_process
        if not console.is_interactive:
            return print_status(board, say, ended)
        return draw_status(
            board,
            console,
            ended,
            title=f"specserve   {', '.join(names)}   {url}",
            hints=(" \\\n  ".join(command), "Ctrl-C ends it"),
        )
    return None


@contextlib.contextmanager
def _limited_end(guard: RayGuard, is_ready: threading.Event) -> Iterator[None]:
    """End this process and its Ray END_WITHIN_S after a signal, if the context has not ended.

    If its Ray has ended before, at once. A call of a Ray that has ended may hold the main thread,
    which runs no handler meanwhile; the interpreter writes each signal into a socket at once.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    has_ended = threading.Event()

    def watch() -> None:
        with reader:  # open until no signal is written any more: a second one may follow
            while (received := reader.recv(1)) and received[0] not in ENDING:
                pass
            if not received or has_ended.wait(DYING_S):
                return
            if guard.ended_process() or not has_ended.wait(END_WITHIN_S):
                guard.close()
                quick_exit(0 if is_ready.is_set() else INTERRUPTED)

    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True, name="end").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        has_ended.set()
        writer.close()


def _end_without_ray(guard: RayGuard, ended: str) -> NoReturn:
    """End this process, since every call of a Ray that has ended waits for it."""
    print(
        f"specserve: Ray's {ended} has ended, and the server with it; see whether something killed "
        "it, as the system does when memory runs out, and start again",
        file=sys.stderr,
    )
    guard.close()
    quick_exit(1)
