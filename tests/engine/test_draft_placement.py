"""The choice of the draft's placement, from the seconds of passes."""

from __future__ import annotations

import pytest

from specserve.engine.draft_placement import PlacementCosts, choose_placement

LIGHT = ((1, 0.001), (8, 0.0015))
"""A draft that takes a thirtieth of a pass of the target."""
HEAVY = ((1, 0.005), (8, 0.006))
ALL_CORES = ((1, 0.030), (8, 0.033), (32, 0.055), (64, 0.100))
HALF_THE_CORES = ((1, 0.031), (8, 0.050), (32, 0.110), (64, 0.200))


def test_a_draft_that_weighs_little_is_not_worth_the_cores_of_the_target() -> None:
    choice = choose_placement(
        PlacementCosts(ALL_CORES, LIGHT),
        PlacementCosts(HALF_THE_CORES, LIGHT),
        loads=(1, 8),
        max_gamma=8,
    )
    assert choice.placement == "together"
    assert all(one > other for one, other in zip(choice.together, choice.apart, strict=True))


def test_a_draft_that_weighs_much_is_hidden_on_a_device_of_its_own() -> None:
    choice = choose_placement(
        PlacementCosts(ALL_CORES, HEAVY), PlacementCosts(ALL_CORES, HEAVY), loads=(1,), max_gamma=8
    )
    assert choice.placement == "apart"
    assert choice.apart[0] > 1.2 * choice.together[0]


@pytest.mark.parametrize("alpha", [0.3, 0.9])
def test_what_is_assumed_of_acceptance_reaches_the_rates(alpha: float) -> None:
    costs = PlacementCosts(ALL_CORES, LIGHT)
    usual, other = (
        choose_placement(costs, costs, loads=(1,), max_gamma=8, alpha=one).together[0]
        for one in (0.7, alpha)
    )
    assert (other > usual) == (alpha > 0.7)


def test_the_reason_names_both_placements_and_their_rates() -> None:
    choice = choose_placement(
        PlacementCosts(ALL_CORES, LIGHT),
        PlacementCosts(HALF_THE_CORES, LIGHT),
        loads=(1, 8),
        max_gamma=8,
    )
    reason = choice.reason
    assert reason.startswith("together, expected to reach ")
    assert f"apart {choice.apart[0]:.0f} and {choice.apart[1]:.0f}" in reason
    assert "at 1 and 8 streams" in reason
