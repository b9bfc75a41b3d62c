"""A live application starts engines under load, and ends them again, without losing a text."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai

from lab.bench.fake_engine import PacedEngine
from tests.support.ray_server import SharedServe

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


def test_a_live_application_grows_under_load_and_shrinks_again(shared_serve: SharedServe) -> None:
    with (
        shared_serve.served(SCALING_KEYS, engine=PacedEngine) as (url, config),
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


def test_a_live_application_grows_when_first_tokens_are_late(shared_serve: SharedServe) -> None:
    """Check it with a target that no engine with several requests keeps to.

    The requests are short: each load needs three first tokens before it counts.
    """
    keys = {
        **SCALING_KEYS,
        "replicas.target_ongoing_requests": 1000,
        "replicas.target_ttft_s": 1e-4,
        "target.threads": 1,
        "cache.pages": 256,
    }
    with shared_serve.served(keys) as (url, config):
        with asking(url):
            wait_until(lambda: num_started(config.name) == 2)
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            metrics = answer.read().decode()
    limits = re.findall(r"^specserve_engine_load_limit{.*} (.*)$", metrics, re.MULTILINE)
    assert 1 <= max(map(float, limits)) < 2 * NUM_STREAMS


@contextmanager
def asking(url: str) -> Iterator[None]:
    """Ask for short continuations of long prompts, several at a time, until the block ends."""
    enough = threading.Event()

    def ask(number: int) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            while not enough.is_set():
                prompt = f"# {number} {time.monotonic()}" * 20
                client.completions.create(model="demo", prompt=prompt, max_tokens=8)

    with ThreadPoolExecutor(2 * NUM_STREAMS) as threads:
        asked = [threads.submit(ask, number) for number in range(2 * NUM_STREAMS)]
        try:
            yield
        finally:
            enough.set()
            for one in asked:
                one.result()


def num_engines(application: str) -> int:
    """Count the engine replicas that run, or return 0 while some start or stop."""
    states = replica_states(application)
    return states["RUNNING"] if {*states} == {"RUNNING"} else 0


def num_started(application: str) -> int:
    """Count the engine replicas that run or start."""
    states = replica_states(application)
    return states.get("STARTING", 0) + states.get("RUNNING", 0)


def replica_states(application: str) -> dict[str, int]:
    from ray import serve

    deployment = serve.status().applications[application].deployments["Engine"]
    return {str(state): count for state, count in deployment.replica_states.items()}


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.1)
