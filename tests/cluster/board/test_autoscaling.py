"""Replicas that a load asks for, by requests, pages and first tokens, without oscillation."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from specserve.cluster.board.autoscaling import (
    CPU_METRIC,
    HIGHEST_METRIC,
    LIMIT_METRIC,
    PAGES_METRIC,
    START_METRIC,
    first_token_policy,
    gateway_policy,
    policy,
)
from specserve.engine.first_tokens import BUCKET_RATIO, HALF_LIFE_S


def context(
    *, requests: float, pages: list[float], replicas: int, target: float = 10.0
) -> SimpleNamespace:
    return SimpleNamespace(
        target_num_replicas=replicas,
        total_num_requests=requests,
        aggregated_metrics={PAGES_METRIC: dict(enumerate(pages))} if pages else {},
        config=SimpleNamespace(get_target_ongoing_requests=lambda: target),
    )


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (context(requests=5, pages=[0.1], replicas=1), 0.5),
        (context(requests=25, pages=[0.1], replicas=1), 2.5),
        (context(requests=4, pages=[2.4], replicas=1), 3.0),
        (context(requests=4, pages=[], replicas=0), 0.4),
        (context(requests=18, pages=[0.3, 0.3, 0.3], replicas=3), 3.0),
        (context(requests=16, pages=[0.3, 0.3, 0.3], replicas=3), 1.6),
        (context(requests=0, pages=[0.0], replicas=1), 0.0),
    ],
    ids=[
        "light",
        "many requests",
        "few requests that fill the cache",
        "none yet",
        "just too much for one fewer",
        "one fewer will do",
        "idle",
    ],
)
def test_the_policy_asks_for_what_the_load_keeps_busy(
    asked: SimpleNamespace, wanted: float
) -> None:
    assert policy(asked)[0] == pytest.approx(wanted)


def test_a_load_between_two_sizes_does_not_make_it_swing() -> None:
    """Check that the load of 1.05 for which it grew to two keeps two."""
    assert policy(context(requests=10.5, pages=[0.2], replicas=1))[0] > 1
    assert policy(context(requests=9.5, pages=[0.1, 0.1], replicas=2))[0] == 2


@pytest.mark.parametrize(
    ("streams", "shares", "wanted"),
    [
        (128, [0.1], 0.5),
        (512, [0.3], 2.0),
        (64, [1.05], 1.5),
        (64, [0.7, 0.7], 2.0),
        (64, [0.35, 0.28], 2),
        (64, [0.2, 0.15], 0.5),
        (64, [], 0.25),
        (0, [0.02], 0.02 / 0.7),
    ],
    ids=[
        "light",
        "many streams",
        "few streams that fill the core",
        "both are needed",
        "one fewer would hardly do",
        "one fewer will do",
        "nothing reported yet",
        "idle",
    ],
)
def test_gateways_are_as_many_as_streams_or_their_cpus_need(
    streams: float, shares: list[float], wanted: float
) -> None:
    asked = SimpleNamespace(
        target_num_replicas=max(1, len(shares)),
        total_num_requests=streams,
        aggregated_metrics={CPU_METRIC: dict(enumerate(shares))} if shares else {},
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 256.0),
    )
    assert gateway_policy(asked)[0] == pytest.approx(wanted)


class Load:
    """Decisions of the policy for first tokens, a second apart, with the state between them."""

    def __init__(self, *, target: float = 32.0) -> None:
        self.now, self.replicas = 0.0, 1
        self._target, self._state = target, dict[str, object]()

    def decide(
        self,
        requests: float,
        *,
        limits: Sequence[float] = (0.0,),
        highest: float = 0.0,
        start_s: float = 0.0,
        seconds: int = 1,
    ) -> float:
        for _ in range(seconds):
            self.now += 1.0
            asked = SimpleNamespace(
                target_num_replicas=self.replicas,
                total_num_requests=requests,
                current_time=self.now,
                aggregated_metrics={PAGES_METRIC: {0: 0.0}},
                raw_metrics={
                    LIMIT_METRIC: {i: readings(99.0, limit) for i, limit in enumerate(limits)},
                    HIGHEST_METRIC: {0: readings(highest)},
                    START_METRIC: {0: readings(start_s)},
                },
                policy_state=self._state,
                config=SimpleNamespace(get_target_ongoing_requests=lambda: self._target),
            )
            wanted, self._state = first_token_policy(asked)
        return wanted


def readings(*values: float) -> list[SimpleNamespace]:
    return [SimpleNamespace(value=value) for value in values]


def test_the_limit_that_the_engines_measure_takes_the_place_of_the_target() -> None:
    assert Load().decide(12.0) < 1
    assert Load().decide(12.0, limits=[4.0]) == pytest.approx(3.0)
    assert Load().decide(12.0, limits=[4.0, 8.0, 0.0]) == pytest.approx(2.0)


def test_a_load_that_was_served_in_time_is_no_reason_for_another_engine() -> None:
    assert Load(target=8.0).decide(12.0) == pytest.approx(1.5)
    assert Load(target=8.0).decide(12.0, highest=16.0) < 1


def test_engines_are_asked_for_as_early_as_they_take_to_start() -> None:
    quick, slow = Load(), Load()
    for second in range(600):
        at_once = quick.decide(second / 20, limits=[6.0])
        early = slow.decide(second / 20, limits=[6.0], start_s=60.0)
    assert at_once == pytest.approx(30 / 6, rel=0.05)
    assert early == pytest.approx((30 + 60 / 20) / 6, rel=0.05)


def test_a_limit_outlives_the_engine_that_measured_it_and_is_raised_in_steps() -> None:
    load = Load()
    load.decide(12.0, limits=[4.0])
    assert load.decide(12.0, limits=[], seconds=60) == pytest.approx(3.0)
    load.decide(12.0, limits=[0.0], seconds=int(HALF_LIFE_S))
    assert load.decide(12.0) == pytest.approx(3.0 / BUCKET_RATIO)


def test_an_idle_application_asks_for_no_engine() -> None:
    load = Load()
    load.decide(20.0, limits=[4.0], seconds=30)
    assert load.decide(0.0, limits=[4.0]) <= 1
    load.replicas = 0
    assert load.decide(0.0, limits=[], seconds=9) == 0.0
