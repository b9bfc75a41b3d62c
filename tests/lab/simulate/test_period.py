"""The figures of a period: what happened in it, and nothing before or after."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.simulate.load import Arrival
from lab.simulate.pass_times import LinearPassTime
from lab.simulate.run import simulate
from lab.simulate.scenario import DeviceGroup, Mode, Scenario
from specserve.config.tree import config_from_keys

VERIFY, DRAFT = 0.010, 0.001


def scenario(mode: Mode, *, engines: int = 1) -> Scenario:
    keys = {
        "speculation.gamma": 0 if mode is Mode.PLAIN else 4,
        "replicas.min": engines,
        "replicas.max": engines,
        "draft.pool.name": "shared",
        "draft.pool.devices": 1,
    }
    return Scenario(
        target=DeviceGroup(LinearPassTime(fixed=VERIFY)),
        draft=None if mode is Mode.PLAIN else DeviceGroup(LinearPassTime(fixed=DRAFT)),
        arrivals=tuple(Arrival(0.5 * number, 1, 100) for number in range(16)),
        mode=mode,
        config=config_from_keys(keys),
        period=(2.0, 6.0),
    )


def test_a_period_has_the_tokens_and_passes_between_two_times() -> None:
    """Each request takes one of two engines for 1 s, and one comes every 0.5 s."""
    period = simulate(scenario(Mode.PLAIN, engines=2)).period
    assert period is not None
    assert period.tokens_per_second == pytest.approx(200, rel=0.02)
    assert period.target_busy <= 1
    sent = [one.sent for one in period.requests]
    assert sent == pytest.approx([2.0 + 0.5 * number for number in range(8)])
    assert period.time_per_token is not None
    assert period.time_per_token.p50 == pytest.approx(VERIFY)
    assert period.draft_busy == period.draft_asked == 0


@pytest.mark.parametrize("mode", [Mode.LOCKSTEP, Mode.TOGETHER])
def test_a_draft_that_prepares_nothing_drafts_what_is_asked_alone(mode: Mode) -> None:
    period = simulate(scenario(mode)).period
    assert period is not None
    assert 0 < period.draft_asked == pytest.approx(period.draft_busy)


@pytest.mark.parametrize("mode", [Mode.ANTICIPATED, Mode.POOLED])
def test_a_draft_that_prepares_is_asked_for_a_part_of_its_passes(mode: Mode) -> None:
    period = simulate(scenario(mode, engines=2)).period
    assert period is not None
    assert 0 < period.draft_asked < period.draft_busy <= 1.05


def test_a_run_without_a_period_has_no_such_figures() -> None:
    assert simulate(replace(scenario(Mode.PLAIN), period=None)).period is None
