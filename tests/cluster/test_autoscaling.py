"""Replicas that a load asks for, by requests and by pages, without oscillation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specserve.cluster.autoscaling import PAGES_METRIC, policy


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
