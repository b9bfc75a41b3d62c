"""Replicas that a load asks for, by requests and by pages, without oscillation."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import openai
import pytest

from benchmarks.fake_engine import PacedEngine
from specserve.cluster.autoscaling import PAGES_METRIC, policy
from tests.support.ray_server import served

SCALING_KEYS: dict[str, object] = {
    "draft.kind": "none",
    "draft.path": None,
    "replicas.min": 1,
    "replicas.max": 2,
    "replicas.target_ongoing_requests": 2,
    "replicas.upscale_delay_s": 0.5,
    "replicas.downscale_delay_s": 1.0,
}
NUM_STREAMS = 4
"""Streams at once: as many as two replicas are meant for."""
LIMIT_S = 120.0


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


@pytest.mark.ray
def test_a_live_application_grows_under_load_and_shrinks_again() -> None:
    with (
        served(SCALING_KEYS, engine=PacedEngine) as (url, config),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):

        def open_stream() -> openai.Stream[openai.types.Completion]:
            return client.completions.create(
                model="demo", prompt="def f(x):", max_tokens=100_000, stream=True
            )

        assert num_engines(config.name) == 1
        streams = [open_stream() for _ in range(NUM_STREAMS)]
        for stream in streams:
            next(stream)
        wait_until(lambda: num_engines(config.name) == 2)
        for stream in streams:
            assert next(stream).choices[0].text, "a stream broke when a replica was added"
            stream.close()
        wait_until(lambda: num_engines(config.name) == 1)
        with open_stream() as stream:
            assert next(stream).choices[0].text


def num_engines(application: str) -> int:
    """Count the engine replicas that run."""
    from ray import serve

    deployment = serve.status().applications[application].deployments["Engine"]
    states = deployment.replica_states
    return states["RUNNING"] if {*states} == {"RUNNING"} else 0  # type: ignore[index]


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.1)
