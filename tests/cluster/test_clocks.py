"""Times of another host, told by our own clock."""

from __future__ import annotations

import random

from specserve.cluster.clocks import Alignment
from specserve.types import Span


def exchange(
    clock: Alignment, sent: float, *, there: float, work: float, back: float, ahead: float
) -> float:
    """A worker whose clock is `ahead`; where the span of its work seems to begin, relative to when it did."""
    begun = sent + there
    (span,) = clock.aligned(
        [Span("verify", begun + ahead, begun + work + ahead)],
        sent=sent,
        answered=begun + work + back,
    )
    return span.begun - begun


def test_on_one_host_the_times_stay_as_they_are() -> None:
    clock = Alignment()
    assert all(
        exchange(clock, float(i), there=4e-5, work=0.01, back=9e-5, ahead=0.0) == 0
        for i in range(20)
    )


def test_another_zero_is_found_to_within_half_the_quickest_way() -> None:
    clock, chance = Alignment(), random.Random(1)
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
    clock = Alignment()
    for i in range(20_000):
        error = exchange(
            clock, i / 50, there=1e-4, work=0.01, back=1e-4, ahead=100.0 + i * 1e-6
        )  # 50 us a second, as bad clocks do
    assert abs(error) < 4e-4


def test_a_worker_that_says_nothing_is_not_aligned() -> None:
    assert Alignment().aligned([], sent=1.0, answered=2.0) == ()
