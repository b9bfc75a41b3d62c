"""Estimates of acceptance and of seconds a pass, from what rounds have shown."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specserve.engine.batch import Outcome
from specserve.engine.estimates import AcceptanceEstimate, CostEstimate

CURVE = ((1, 0.010), (8, 0.011), (32, 0.020), (64, 0.036))


def test_drafts_past_a_rejection_are_neither_accepted_nor_rejected() -> None:
    acceptance = AcceptanceEstimate(4)
    for _ in range(500):
        acceptance.observe([Outcome(1, 4, 1)])
    assert acceptance.alpha == pytest.approx(0.5, abs=0.01)
    assert acceptance.profile[0] > 0.8
    assert acceptance.profile[1] < 0.25
    assert acceptance.profile[3] == pytest.approx(acceptance.alpha), (
        "a position that was never reached has the mean"
    )


def test_a_sequence_that_is_better_than_most_is_expected_to_get_further() -> None:
    acceptance = AcceptanceEstimate(6)
    for _ in range(60):
        acceptance.observe([Outcome(1, 6, 6), Outcome(2, 6, 0)])
    good, bad, new = acceptance.reach([1, 2, 3])
    assert good[3] > new[3] > bad[3]
    assert (np.diff(good) <= 0).all()
    acceptance.keep_only([2])
    assert acceptance.reach([1])[0] == pytest.approx(acceptance.reach([3])[0]), (
        "counts of dropped sequences are gone"
    )


def test_rounds_without_proposals_do_not_decay_the_counts() -> None:
    acceptance = AcceptanceEstimate(4)
    before = acceptance.alpha
    for _ in range(10_000):
        acceptance.observe([])
    assert acceptance.alpha == before


def test_before_any_round_the_warm_up_is_the_estimate() -> None:
    costs = CostEstimate(CURVE)
    assert float(costs.verify_seconds(1)) == pytest.approx(0.010)
    assert float(costs.verify_seconds(20)) == pytest.approx(0.0155)
    assert float(costs.verify_seconds(96)) == pytest.approx(0.052), (
        "beyond the last measurement the last line goes on"
    )


def test_a_machine_that_slows_down_raises_the_whole_curve() -> None:
    costs = CostEstimate(CURVE)
    for _ in range(100):
        costs.observe_verify(8, 0.022)
    assert float(costs.verify_seconds(8)) == pytest.approx(0.022, rel=0.01)
    assert float(costs.verify_seconds(64)) == pytest.approx(0.072, rel=0.05)


def test_positions_that_cost_more_than_the_warm_up_said_raise_the_slope() -> None:
    costs, chance = CostEstimate(((1, 0.010), (64, 0.030))), random.Random(1)
    for _ in range(600):
        rows = chance.choice((8, 16, 24, 40))
        costs.observe_verify(rows, 0.010 + 0.001 * rows)
    assert float(costs.verify_seconds(40) / costs.verify_seconds(8)) == pytest.approx(
        50 / 18, rel=0.2
    )


def test_the_wait_for_prepared_proposals_is_separated_from_the_cost_of_a_pass() -> None:
    costs = CostEstimate(CURVE)
    for number in range(400):
        hit = number % 2 == 0
        if not hit:
            costs.observe_draft(0.0003 + 4 * 0.0005, passes=4, count=1)
        costs.observe_hits(int(hit), 1, seconds=0.0003 if hit else None)
    assert costs.hit_wait == pytest.approx(0.0003, rel=0.01)
    assert costs.draft_pass_seconds(1) == pytest.approx(0.0005, rel=0.05)
    assert costs.hit_rate == pytest.approx(0.5, abs=0.06)


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    costs = CostEstimate(())
    for _ in range(10):
        costs.observe_verify(4, 0.0)
        costs.observe_draft(0.0, passes=3, count=2)
        costs.observe_hits(0, 2, seconds=None)
    assert float(costs.verify_seconds(8)) > 0
    assert costs.draft_pass_seconds(2) >= 0


def test_a_draft_pass_for_more_sequences_costs_more_as_a_target_pass_does() -> None:
    costs = CostEstimate(CURVE)
    for _ in range(4):
        costs.observe_draft(0.002, passes=2, count=1)
    assert costs.draft_pass_seconds(1) == pytest.approx(0.001)
    assert costs.draft_pass_seconds(32) == pytest.approx(0.002)
