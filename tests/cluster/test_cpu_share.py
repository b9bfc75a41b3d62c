"""The share of a core that a process uses, from one reading to the next."""

from __future__ import annotations

import time

import pytest

from specserve.cluster.cpu_share import CpuShare


def test_a_reading_is_of_the_time_since_the_last_one() -> None:
    now, used = 100.0, 7.0
    share = CpuShare(clock=lambda: now, cpu_clock=lambda: used)
    now, used = 110.0, 9.0
    assert share.read() == pytest.approx(0.2)
    now, used = 114.0, 15.0
    assert share.read() == pytest.approx(1.5), "threads may use more than a core"
    assert share.read() == 0.0


def test_a_process_that_computes_is_seen() -> None:
    share, begun = CpuShare(), time.process_time()
    while time.process_time() - begun < 0.02:
        pass
    assert share.read() > 0
