"""The screen of `specserve serve`: its figures, its page, and a terminal that is left as it was."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import shlex
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
from rich.console import Console
from transformers import AutoTokenizer

from specserve.api.service import Status
from specserve.api.tokenizer import Tokenizer
from specserve.cli.console import WINDOW_S, StatusLine, StatusScreen, StatusWindow
from specserve.cli.status_display import example, has_chat_template
from specserve.config.tree import DEMO
from specserve.engine.draft_placement import PlacementChoice
from specserve.metrics import Registry, Snapshot
from tests.support.http_server import serving

# A process of its own, as `specserve serve` is one: Ctrl-C reaches it through the terminal.
PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[1])
from rich.console import Console
from rich.live import Live
from tests.cli.test_console import snapshot, status
from specserve.cli.console import StatusScreen

console = Console()
print("ready http://127.0.0.1:1", flush=True)
screen = StatusScreen(title="specserve   demo", hints=("curl it", "Ctrl-C ends it"))
try:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for number in range(10_000):
            live.update(screen.render(status(snapshot(generated=100 * number))), refresh=True)
            time.sleep(0.05)
except KeyboardInterrupt:
    print("stopping", flush=True)
"""


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def snapshot(
    *,
    generated: int = 0,
    drafts: int = 0,
    accepted: tuple[int, ...] = (),
    hits: int = 0,
    misses: int = 0,
) -> Snapshot:
    registry = Registry()
    registry.counter("generation_tokens_total").add(generated)
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


def status(
    *metrics: Snapshot,
    why: str = "",
    troubles: tuple[str, ...] = (),
    draft_placements: tuple[str, ...] = (),
    losses: tuple[str, ...] = (),
) -> Status:
    return Status(
        ready=not why,
        healthy=not why,
        why=why,
        replicas=len(metrics),
        metrics=metrics,
        troubles=troubles,
        draft_placements=draft_placements,
        losses=losses,
    )


def page(screen: StatusScreen, shown: Status | None, *, missing: str = "") -> list[str]:
    return screen.render(shown, missing=missing).plain.split("\n")


def test_figures_are_of_the_last_seconds_and_not_of_all_time() -> None:
    window = StatusWindow()
    window.add(
        status(snapshot(generated=1000, drafts=100, accepted=(50, 20), hits=10, misses=90)), 0.0
    )
    figures = window.add(
        status(snapshot(generated=1300, drafts=110, accepted=(58, 25), hits=19, misses=91)), 2.0
    )
    assert figures.tokens_per_second == 150
    assert (figures.accepted, figures.mean_accepted) == (13 / 40, 1.3)
    assert figures.by_position == (0.8, 0.5)
    assert figures.hit_rate == 0.9
    assert (figures.running, figures.restarts, figures.failures) == (2, {"draft": 2}, {"429": 3})
    assert (figures.cache, figures.busy) == ({"target": 0.25}, {"target": 0.9})
    later = window.add(
        status(snapshot(generated=1300, drafts=110, accepted=(58, 25))), 2.0 + WINDOW_S
    )
    assert later.tokens_per_second == 0
    assert later.accepted is None
    assert later.by_position == ()


def test_figures_of_several_replicas_add_up_and_never_fall_below_nothing() -> None:
    window = StatusWindow()
    window.add(status(snapshot(generated=500), snapshot(generated=500)), 0.0)
    assert (
        window.add(status(snapshot(generated=700), snapshot(generated=900)), 2.0).tokens_per_second
        == 300
    )
    assert window.add(status(snapshot(generated=10)), 3.0).tokens_per_second == 0


def test_the_page_has_what_runs_and_what_went_wrong() -> None:
    title = "specserve   demo   http://127.0.0.1:8000"
    screen = StatusScreen(title=title, hints=("curl it",))
    screen.render(status(snapshot()))
    served = snapshot(drafts=10, accepted=(8, 5), hits=9, misses=1)
    trouble, apart = (
        ("the draft is\nbeing restarted",),
        (PlacementChoice("apart", (1,), (4,), (9,)).reason,),
    )
    losses = ("draft: killed\nby a signal",)
    shown = status(served, troubles=trouble, draft_placements=apart, losses=losses)
    lines = page(screen, shown)
    assert lines[0].startswith(f"{title}   up 0:00:0")
    assert lines[1] == "healthy, one engine or more in trouble"
    assert lines[2] == "draft apart"
    rows = {line[:16].strip(): line[16:] for line in lines}
    assert rows["requests"] == "2 running, 0 waiting, 0 done, 3 failed (429: 3)"
    assert rows["accepted"] == "32% of drafts, 1.30 a proposal (gamma 0)"
    assert rows["by position"] == "0.80 0.50"
    assert rows["anticipated"] == "90% of proposals"
    assert rows["busy, target"] == "[##################..]  90%"
    assert rows["restarts"] == "draft: 2"
    assert rows["last of"] == "draft: killed by a signal", "restarts are shown with their reason"
    assert [line for line in lines if line.endswith("  the draft is being restarted")]
    assert lines[-1] == "curl it"


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_command_to_try_is_whole_on_a_terminal_of_80_columns(is_chat: bool) -> None:
    hint = " \\\n  ".join(example("http://127.0.0.1:8000", "smollm2", is_chat=is_chat))
    screen = StatusScreen(title="", hints=(hint,))
    shown = page(screen, status(snapshot()))
    assert shlex.split("\n".join(shown[-3:])) == shlex.split(hint)
    assert max(map(len, shown[-3:])) <= 80


@pytest.mark.parametrize(
    ("template", "is_chat"), [("{{ messages[0].content }}", True), (None, False)]
)
def test_a_server_says_whether_its_model_is_made_for_chats(
    template: str | None, is_chat: bool
) -> None:
    made = AutoTokenizer.from_pretrained(DEMO / "target")
    made.chat_template = template
    with serving(tokenizer=Tokenizer(made)) as server:
        assert has_chat_template(server.url) is is_chat
    assert not has_chat_template(server.url)


def test_a_line_says_once_where_the_draft_lives() -> None:
    line, where = StatusLine(), ("together",)
    first = line.next(status(snapshot(), draft_placements=where), 0.0)
    assert first == "2 running, 0 waiting on 1 engines; draft together"
    second = line.next(status(snapshot(generated=5), draft_placements=where), 1.0)
    assert second == "2 running, 0 waiting on 1 engines, 5 tokens/s"


def test_an_error_is_kept_after_its_end_and_listed_once_while_it_lasts() -> None:
    screen = StatusScreen(title="", hints=())
    for _ in range(3):
        screen.render(status(snapshot(), why="no engine replica reports"))
    lines = page(screen, None, missing="TimeoutError")
    assert lines[1] == "no status: TimeoutError"
    assert [line[10:] for line in lines if line[2:3] == ":"] == [
        "no engine replica reports",
        "TimeoutError",
    ]
    assert page(screen, status(snapshot()))[1] == "healthy"


@pytest.mark.parametrize("colours", [True, False])
def test_colours_are_left_out_where_no_color_is_set(
    colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colours:
        monkeypatch.setenv("NO_COLOR", "1")
    out = FakeTerminal()
    Console(file=out).print(StatusScreen(title="", hints=()).render(status(snapshot())))
    assert ("\x1b[32mhealthy\x1b[0m" in out.getvalue()) is colours


def test_a_dumb_terminal_and_a_file_are_not_drawn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert Console(file=FakeTerminal()).is_interactive
    assert not Console(file=io.StringIO()).is_interactive
    monkeypatch.setenv("TERM", "dumb")
    assert not Console(file=FakeTerminal()).is_interactive


@contextmanager
def in_a_terminal(rows: int, columns: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run the program in a terminal; yield it and the end from which the terminal is read."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    root = str(Path(__file__).parents[2])
    without = ("NO_COLOR", "COLUMNS", "LINES")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, root],
        stdin=follower,
        stdout=follower,
        start_new_session=True,
        env=environment | {"TERM": "xterm"},
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
        assert before.startswith(b"ready http://127.0.0.1:1\r\n")
        assert b"\x1b[?1049h" in before, "the page is drawn on the alternate screen"
        assert b"\x1b[?25l" in before, "the cursor is hidden"
        fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("HHHH", 4, 12, 0, 0))
        frame = read_until(leader, b"\x1b[H").rpartition(b"\x1b[H")[2]
        while frame.count(b"\n") != 3:  # until a frame of four lines has been drawn
            frame = read_until(leader, b"\x1b[H").split(b"\x1b[H")[-2]
        assert b"specserve" in frame
        process.send_signal(signal.SIGINT)
        after = read_until(leader, b"stopping\r\n")
        end = after[after.rindex(b"\x1b[?1049l") :]
        assert end.endswith(b"stopping\r\n")
        assert b"\x1b[?25h" in after, "the cursor is shown again"
        assert process.wait(timeout=30) == 0
