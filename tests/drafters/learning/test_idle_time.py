"""Steps of idle work start where they fit, and else seldom."""

from __future__ import annotations

import pytest

from specserve.drafters.learning.idle_time import MAX_CREDIT_S, IdleTime


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def after_gaps(clock: Clock, *gaps: float) -> IdleTime:
    idle = IdleTime(clock=clock, share=0.05)
    for gap in gaps:
        idle.on_answer()
        clock.now += gap
        idle.on_message()
    idle.on_step(MAX_CREDIT_S, is_awaited=True)  # nothing is left of the share
    idle.on_answer()
    return idle


def test_a_step_that_fits_into_the_gap_starts_at_once() -> None:
    clock = Clock()
    idle = after_gaps(clock, 0.02, 0.03)
    assert idle.wait_s(0.01) == 0
    clock.now += 0.015
    assert idle.wait_s(0.01) > 0  # a message would wait


def test_a_step_that_does_not_fit_waits_until_no_message_is_expected() -> None:
    clock = Clock()
    idle = after_gaps(clock, 0.02, 0.02)
    wait = idle.wait_s(0.05)
    assert wait == pytest.approx(0.08)
    clock.now += wait + 1e-6
    assert idle.wait_s(0.05) == 0


def test_messages_wait_for_steps_in_a_small_share_of_the_time() -> None:
    clock = Clock()
    idle = after_gaps(clock, 0.01)
    spent = 0.0
    for _ in range(10_000):
        idle.on_answer()
        if not idle.wait_s(0.05):
            clock.now += 0.05
            idle.on_step(0.05, is_awaited=True)
            spent += 0.05
        clock.now += 0.01
        idle.on_message()
    assert 0.03 < spent / clock.now < 0.07


def test_a_step_while_a_message_is_answered_is_taken_from_the_share() -> None:
    clock = Clock()
    idle = after_gaps(clock, 0.01)
    idle.on_message()
    wait = idle.wait_s(0.05)
    clock.now += wait
    assert wait > 1
    assert idle.wait_s(0.05) == pytest.approx(0)
