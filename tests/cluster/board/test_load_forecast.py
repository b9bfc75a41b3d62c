"""Forecasts of loads that are steady, that grow and that scatter."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from specserve.cluster.board.load_forecast import LoadForecast


def forecast_of(load: Callable[[float], float], *, seconds: int = 900) -> LoadForecast:
    forecast = LoadForecast(0.0, load(0.0))
    for now in range(1, seconds):
        forecast = forecast.observe(float(now), load(float(now)))
    return forecast


def test_a_steady_load_is_forecast_as_it_is() -> None:
    assert forecast_of(lambda _: 7.0).upper(300.0) == pytest.approx(7.0)


def test_a_growing_load_is_forecast_for_the_end_of_the_lead() -> None:
    growing = forecast_of(lambda now: 0.1 * now)
    assert growing.upper(60.0) == pytest.approx(0.1 * (899 + 60), rel=0.05)


def test_a_load_that_scatters_is_given_room() -> None:
    rng = random.Random(0)
    scattered = forecast_of(lambda _: rng.choice([4.0, 12.0]))
    assert 12.0 < scattered.upper(0.0) < 20.0


def test_a_falling_load_is_never_forecast_below_zero() -> None:
    assert forecast_of(lambda now: 900 - now).upper(1e6) == 0.0


def test_the_time_between_readings_makes_little_difference() -> None:
    seldom, often = LoadForecast(0.0, 0.0), LoadForecast(0.0, 0.0)
    for tick in range(1, 6001):
        often = often.observe(tick / 10, 5.0)
        if tick % 50 == 0:
            seldom = seldom.observe(tick / 10, 5.0)
    assert seldom.upper(0.0) == pytest.approx(often.upper(0.0), rel=0.1)


def test_a_reading_at_the_time_of_the_last_one_is_left_out() -> None:
    forecast = LoadForecast(5.0, 3.0)
    assert forecast.observe(5.0, 100.0) == forecast
