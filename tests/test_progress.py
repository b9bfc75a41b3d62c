"""Progress of long work: a bar on a terminal, lines elsewhere, nothing for short work."""

from __future__ import annotations

import io
import re
import threading
import time

import pytest

from specserve import progress
from specserve.progress import ProgressBar

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def wait_for_frames(out: FakeTerminal, wanted: str) -> None:
    end = time.monotonic() + 60
    while ESCAPES.sub("", out.getvalue()).count(wanted) < 3:
        assert time.monotonic() < end, out.getvalue()
        time.sleep(0.02)


def test_a_terminal_gets_a_bar_that_is_redrawn_and_erased() -> None:
    out = FakeTerminal()
    with ProgressBar(out) as report_progress:
        report_progress("counting", 0.5, "a.txt")
        wait_for_frames(out, "counting, 50%, a.txt, ")
    assert out.getvalue().endswith("\x1b[2K"), "the last thing written erases the line"


def test_a_bar_that_is_kept_leaves_its_last_state_as_a_line() -> None:
    for out in (FakeTerminal(), io.StringIO()):
        with ProgressBar(out, keeps=True) as report_progress:
            report_progress("requests", 1.0, "6 of 6")
        last = ESCAPES.sub("", out.getvalue()).splitlines()[-1]
        assert re.search(r"requests, 100%, 6 of 6, \d+ s$", last)


def test_without_a_terminal_short_work_prints_nothing() -> None:
    out = io.StringIO()
    with ProgressBar(out) as report_progress:
        report_progress("loading")
        time.sleep(0.45)
    assert out.getvalue() == ""


def test_without_a_terminal_each_stage_of_long_work_is_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    monkeypatch.setattr(progress, "_POLL_S", 0.02)
    out = io.StringIO()
    with ProgressBar(out) as report_progress:
        for number in range(10):
            stage = "loading" if number < 5 else "fitting"
            report_progress(stage, number / 10, f"step {number}")
            time.sleep(0.04)
    stages = [line.partition(",")[0] for line in out.getvalue().splitlines()]
    assert stages == ["loading", "fitting"], "within a stage, a line is due every 5 seconds only"


def test_an_exception_passes_through_and_the_line_is_erased() -> None:
    out = FakeTerminal()

    def work() -> None:
        with ProgressBar(out) as report_progress:
            report_progress("loading")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert out.getvalue().endswith("\x1b[2K")
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_a_line_that_is_wider_than_the_terminal_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    out = FakeTerminal()
    with ProgressBar(out) as report_progress:
        report_progress("0123456789" * 9)
        wait_for_frames(out, "0123")
    frames = re.split(r"[\r\n]+", ESCAPES.sub("", out.getvalue()))
    assert max(map(len, frames)) <= 50
