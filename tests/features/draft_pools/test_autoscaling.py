"""The number of a draft pool's devices, as Serve's autoscaler gets it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specserve.features.draft_pools.autoscaling import DRAFTS_METRIC, ENGINES_METRIC, pool_policy


@pytest.mark.parametrize(
    ("drafts", "engines", "wanted"),
    [
        ([0.4], [2], 0.4),
        ([1.3], [2], 1.3),
        ([0.8, 0.9], [2, 2], 1.7),
        ([0.5, 0.4], [2, 2], 2),
        ([0.2, 0.3], [2, 2], 0.5),
        ([1.4], [1], 1.0),
        ([0.0], [0], 0.0),
    ],
    ids=[
        "one will do",
        "too busy",
        "both are needed",
        "one fewer would hardly do",
        "one fewer will do",
        "one engine that keeps it busy",
        "no device drafts",
    ],
)
def test_a_pool_has_the_devices_that_its_load_keeps_busy_and_no_more_than_engines(
    drafts: list[float], engines: list[int], wanted: float
) -> None:
    asked = SimpleNamespace(
        target_num_replicas=len(drafts),
        aggregated_metrics={
            DRAFTS_METRIC: dict(enumerate(drafts)),
            ENGINES_METRIC: dict(enumerate(engines)),
        },
    )
    assert pool_policy(asked)[0] == pytest.approx(wanted)
