"""Times of another host, converted to our own clock."""

from __future__ import annotations

import random

from specserve.cluster.engine.clocks import ClockAlignment
from specserve.types import Span


def exchange(
    clock: ClockAlignment, sent: float, *, there: float, work: float, back: float, ahead: float
) -> float:
    """Return the error of the aligned start of a span, for a worker whose clock is `ahead`."""
    start = sent + there
    (span,) = clock.align(
        [Span("verify", start + ahead, start + work + ahead)],
        sent=sent,
        answered=start + work + back,
    )
    return span.start - start


def test_on_one_host_the_times_stay_as_they_are() -> None:
    clock = ClockAlignment()
    assert all(
        exchange(clock, float(i), there=4e-5, work=0.01, back=9e-5, ahead=0.0) == 0
        for i in range(20)
    )


def test_another_zero_is_found_to_within_half_the_quickest_way() -> None:
    clock, chance = ClockAlignment(), random.Random(1)
    errors = [
        exchange(
            clock,
            i / 50,
            there=chance.uniform(1e-4, 2e-3),
            work=0.01,
            back=chance.uniform(1e-4, 2e-3),
            ahead=-5000.0,
        )
        for i in range(300)
    ]
    assert max(abs(error) for error in errors[50:]) < 4e-4


def test_clocks_that_drift_apart_are_followed() -> None:
    clock = ClockAlignment()
    for i in range(20_000):
        ahead = 100.0 + i * 1e-6  # 50 us a second, as bad clocks drift
        error = exchange(clock, i / 50, there=1e-4, work=0.01, back=1e-4, ahead=ahead)
    assert abs(error) < 4e-4


def test_a_worker_that_says_nothing_is_not_aligned() -> None:
    assert ClockAlignment().align([], sent=1.0, answered=2.0) == ()
