"""The screen of `specserve serve`: its figures, what it shows, and that a real terminal is left as it was found."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specserve.api.service import Status
from specserve.cluster.console import Screen
from specserve.cluster.figures import WINDOW_S, Window
from specserve.metrics import Registry, Snapshot
from specserve.terminal import Terminal

# A program of its own, as `specserve serve` is one: Ctrl-C reaches it through the terminal.
PROGRAM = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.cluster.test_console import snapshot, status
from specserve.cluster.console import Screen
from specserve.terminal import Terminal

terminal = Terminal(sys.stdout, colours=True)
print("ready http://127.0.0.1:1", flush=True)
screen = Screen(terminal, title="specserve   demo", hints=("curl it", "Ctrl-C ends it"))
try:
    with terminal.page():
        for number in range(10_000):
            screen.draw(status(snapshot(written=100 * number)))
            time.sleep(0.05)
except KeyboardInterrupt:
    print("stopping", flush=True)
"""


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def snapshot(
    *,
    written: int = 0,
    drafts: int = 0,
    accepted: tuple[int, ...] = (),
    hits: int = 0,
    misses: int = 0,
) -> Snapshot:
    registry = Registry()
    registry.counter("generation_tokens_total").add(written)
    registry.counter("spec_decode_num_drafts_total").add(drafts)
    registry.counter("spec_decode_num_draft_tokens_total").add(4 * drafts)
    registry.counter("spec_decode_num_accepted_tokens_total").add(sum(accepted))
    for position, count in enumerate(accepted):
        registry.counter("spec_decode_num_accepted_tokens_per_pos_total").add(count, str(position))
    registry.counter("anticipation_hits_total").add(hits)
    registry.counter("anticipation_misses_total").add(misses)
    registry.counter("worker_restarts_total").add(2, "draft")
    registry.counter("request_failure_total").add(3, "429")
    registry.gauge("num_requests_running").set(2)
    registry.gauge("kv_cache_usage_perc").set(0.25, "target")
    registry.gauge("device_busy_fraction").set(0.9, "target")
    return registry.snapshot()


def status(*metrics: Snapshot, why: str = "", troubles: tuple[str, ...] = ()) -> Status:
    return Status(
        ready=not why,
        healthy=not why,
        why=why,
        replicas=len(metrics),
        metrics=metrics,
        troubles=troubles,
    )


def page(screen: Screen, out: io.StringIO, *args: object, **kwargs: str) -> list[str]:
    """What the last draw shows, without its codes."""
    out.seek(0)
    out.truncate()
    screen.draw(*args, **kwargs)  # type: ignore[arg-type]
    return (
        out.getvalue()
        .replace("\x1b[H", "")
        .replace("\x1b[J", "")
        .replace("\x1b[K", "")
        .split("\r\n")
    )


def test_figures_are_of_the_last_seconds_and_not_of_all_time() -> None:
    window = Window()
    window.look(
        status(snapshot(written=1000, drafts=100, accepted=(50, 20), hits=10, misses=90)), 0.0
    )
    figures = window.look(
        status(snapshot(written=1300, drafts=110, accepted=(58, 25), hits=19, misses=91)), 2.0
    )
    assert figures.tokens_per_second == 150
    assert (figures.accepted, figures.mean_accepted) == (13 / 40, 1.3)
    assert figures.by_position == (0.8, 0.5)
    assert figures.hit_rate == 0.9
    assert (figures.running, figures.restarts, figures.failures) == (2, {"draft": 2}, {"429": 3})
    assert (figures.cache, figures.busy) == ({"target": 0.25}, {"target": 0.9})
    later = window.look(
        status(snapshot(written=1300, drafts=110, accepted=(58, 25))), 2.0 + WINDOW_S
    )
    assert later.tokens_per_second == 0
    assert later.accepted is None
    assert later.by_position == ()


def test_figures_of_several_replicas_add_up_and_never_fall_below_nothing() -> None:
    window = Window()
    window.look(status(snapshot(written=500), snapshot(written=500)), 0.0)
    assert (
        window.look(status(snapshot(written=700), snapshot(written=900)), 2.0).tokens_per_second
        == 300
    )
    assert window.look(status(snapshot(written=10)), 3.0).tokens_per_second == 0


def test_the_page_has_what_runs_and_what_went_wrong() -> None:
    out = FakeTerminal()
    screen = Screen(
        Terminal(out), title="specserve   demo   http://127.0.0.1:8000", hints=("curl it",)
    )
    screen.draw(status(snapshot()))
    lines = page(
        screen,
        out,
        status(
            snapshot(drafts=10, accepted=(8, 5), hits=9, misses=1),
            troubles=("the draft is\nbeing restarted",),
        ),
    )
    assert lines[0].startswith("specserve   demo   http://127.0.0.1:8000   up 0:00:0")
    assert lines[1] == "healthy, one engine or more in trouble"
    rows = {line[:16].strip(): line[16:] for line in lines}
    assert rows["requests"] == "2 running, 0 waiting, 0 done, 3 failed (429: 3)"
    assert rows["accepted"] == "32% of drafts, 1.30 a proposal (gamma 0.0)"
    assert rows["by position"] == "0.80 0.50"
    assert rows["lay ready"] == "90% of proposals"
    assert rows["busy, target"] == "[##################..]  90%"
    assert rows["restarts"] == "draft: 2"
    assert [line for line in lines if line.endswith("  the draft is being restarted")]
    assert lines[-1] == "curl it"


def test_an_error_is_kept_when_it_is_over_and_told_once_while_it_lasts() -> None:
    out = FakeTerminal()
    screen = Screen(Terminal(out), title="", hints=())
    for _ in range(3):
        screen.draw(status(snapshot(), why="no engine replica reports"))
    lines = page(screen, out, None, missing="TimeoutError")
    assert lines[1] == "no status: TimeoutError"
    assert [line[10:] for line in lines if line[2:3] == ":"] == [
        "no engine replica reports",
        "TimeoutError",
    ]
    assert page(screen, out, status(snapshot()))[1] == "healthy"


@pytest.mark.parametrize(("colours", "painted"), [(True, True), (False, False)])
def test_colours_are_left_out_where_they_are_not_wanted(colours: bool, painted: bool) -> None:
    out = FakeTerminal()
    Screen(Terminal(out, colours=colours), title="", hints=()).draw(status(snapshot()))
    assert ("\x1b[32mhealthy\x1b[0m" in out.getvalue()) is painted


def test_a_dumb_terminal_and_a_file_are_not_drawn_on() -> None:
    assert Terminal(FakeTerminal()).draws
    assert not Terminal(FakeTerminal(), dumb=True).draws
    assert not Terminal(io.StringIO()).draws


@contextmanager
def in_a_terminal(rows: int, columns: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The program, and the end of the terminal at which one looks."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    here = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, here],
        stdin=follower,
        stdout=follower,
        start_new_session=True,
    )
    os.close(follower)
    try:
        yield process, leader
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def read_until(leader: int, wanted: bytes, *, within_s: float = 60.0) -> bytes:
    seen, end = b"", time.monotonic() + within_s
    while wanted not in seen and time.monotonic() < end:
        seen += os.read(leader, 65536)
    assert wanted in seen, seen[-500:]
    return seen


def test_a_real_terminal_is_drawn_on_at_any_size_and_left_as_it_was() -> None:
    with in_a_terminal(24, 80) as (process, leader):
        before = read_until(leader, b"Ctrl-C ends it")
        assert before.startswith(b"ready http://127.0.0.1:1\r\n\x1b[?1049h\x1b[?25l\x1b[H")
        fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("HHHH", 4, 12, 0, 0))
        time.sleep(0.3)
        frame = read_until(leader, b"\x1b[J").rpartition(b"\x1b[H")[2]
        while frame.count(b"\r\n") != 3:
            frame = read_until(leader, b"\x1b[J").rpartition(b"\x1b[H")[2]
        assert b"specserve  \x1b[0m" in frame or frame.startswith(b"\x1b[1mspecserve "), frame
        process.send_signal(signal.SIGINT)
        after = read_until(leader, b"stopping\r\n")
        assert after.endswith(b"\x1b[?25h\x1b[?1049lstopping\r\n")
        assert process.wait(timeout=30) == 0
