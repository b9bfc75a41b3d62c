"""Bars and lines: what is seen of long work, and that short work says nothing where nobody looks."""

from __future__ import annotations

import io
import os
import pty
import re
import threading
import time

from specserve import progress
from specserve.progress import Bar
from specserve.terminal import Terminal


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_that_is_drawn_over_and_goes_away() -> None:
    out = FakeTerminal()
    with Bar(out) as tell:
        tell("counting", 0.5, "a.txt")
        time.sleep(0.5)
    frames = out.getvalue().split("\r\x1b[K")[1:]
    assert re.fullmatch(r"\[#{15}\.{15}\] counting, 50%, a\.txt, 0 s", frames[0])
    assert len(frames) > 2
    assert frames[-1] == ""
    assert "\n" not in out.getvalue()


def test_a_bar_that_is_kept_leaves_its_last_state_as_a_line() -> None:
    for out in (FakeTerminal(), io.StringIO()):
        with Bar(out, keeps=True) as tell:
            tell("requests", 1.0, "6 of 6")
        assert out.getvalue().split("\r\x1b[K")[-1] == "requests, 100%, 6 of 6, 0 s\n"


def test_without_a_terminal_short_work_says_nothing() -> None:
    out = io.StringIO()
    with Bar(out) as tell:
        tell("loading")
        time.sleep(0.45)
    assert out.getvalue() == ""


def test_without_a_terminal_each_stage_of_long_work_is_a_line(monkeypatch) -> None:
    monkeypatch.setattr(progress, "_SHORT_S", 0.0)
    monkeypatch.setattr(progress, "_REDRAW_S", 0.02)
    out = io.StringIO()
    with Bar(out) as tell:
        for number in range(10):
            tell("loading" if number < 5 else "fitting", number / 10, f"step {number}")
            time.sleep(0.04)
    stages = [line.partition(",")[0] for line in out.getvalue().splitlines()]
    assert stages == ["loading", "fitting"], (
        "the share of a stage alone is worth a line every five seconds only"
    )


def test_what_is_wrong_comes_through_and_the_line_is_left_clean() -> None:
    out = FakeTerminal()
    try:
        with Bar(out) as tell:
            tell("loading")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert out.getvalue().endswith("\r\x1b[K")
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_a_line_is_cut_where_a_narrow_terminal_would_break_it() -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as out:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 5, 20, 0, 0))
        Terminal(out).redraw_line("0123456789" * 5)
        assert os.read(leader, 100) == b"\r\x1b[K0123456789012345678"
    os.close(leader)
