"""What the pacer believes of passes: the warm-up's curve, moved and bent by what rounds really took."""

from __future__ import annotations

import random

import pytest

from specserve.engine.estimates import Costs

CURVE = ((1, 0.010), (8, 0.011), (32, 0.020), (64, 0.036))


def test_before_any_round_the_warm_up_is_believed() -> None:
    costs = Costs(CURVE)
    assert float(costs.verify(1)) == pytest.approx(0.010)
    assert float(costs.verify(20)) == pytest.approx(0.0155)
    assert float(costs.verify(96)) == pytest.approx(0.052), (
        "beyond the last measurement it goes on as it ran"
    )


def test_a_machine_that_slows_down_takes_the_whole_curve_with_it() -> None:
    costs = Costs(CURVE)
    for _ in range(100):
        costs.observe_verify(8, 0.022)
    assert float(costs.verify(8)) == pytest.approx(0.022, rel=0.01)
    assert float(costs.verify(64)) == pytest.approx(0.072, rel=0.05)


def test_rows_that_cost_more_than_the_warm_up_said_are_noticed() -> None:
    costs, chance = Costs(((1, 0.010), (64, 0.030))), random.Random(1)
    for _ in range(600):
        rows = chance.choice((8, 16, 24, 40))
        costs.observe_verify(rows, 0.010 + 0.001 * rows)
    assert float(costs.verify(40) / costs.verify(8)) == pytest.approx(50 / 18, rel=0.2)


def test_the_wait_for_what_is_ready_is_told_from_the_price_of_a_pass() -> None:
    costs = Costs(CURVE)
    for number in range(400):
        hit = number % 2 == 0
        costs.observe_draft(
            0.0003 if hit else 0.0003 + 4 * 0.0005,
            passes=0 if hit else 4,
            hits=int(hit),
            proposals=1,
        )
    assert costs.wait == pytest.approx(0.0003, rel=0.01)
    assert costs.draft_pass == pytest.approx(0.0005, rel=0.05)
    assert costs.hit_rate == pytest.approx(0.5, abs=0.06)


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    costs = Costs(())
    for _ in range(10):
        costs.observe_verify(4, 0.0)
        costs.observe_draft(0.0, passes=3, hits=0, proposals=2)
    assert float(costs.verify(8)) > 0
    assert costs.draft_pass >= 0
