"""A draft pool in a real application: two engines, one draft, and the draft killed under load."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specserve.cluster.draft_pool import (
    pool_draft_config,
)
from specserve.cluster.launch import handle
from specserve.config.tree import Config, config_from_keys
from specserve.errors import ConfigError
from tests.support.ray_server import served

PATIENCE_S = 120.0
PROMPTS = [f"def read_{name}(path):\n" for name in ("lines", "words", "bytes", "rows", "keys")]
POOL = {"draft.pool.name": "shared", "replicas.min": 2, "replicas.max": 2}


def until(condition: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < PATIENCE_S, f"not within {PATIENCE_S} s"
        time.sleep(0.05)


def get(url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        content: bytes = answer.read()
        return content


def complete(url: str, prompt: str) -> tuple[str, int]:
    """Return the text of a prompt, and how many draft tokens of it were verified."""
    body = {"prompt": prompt, "max_tokens": 96, "temperature": 0, "model": "demo"}
    answer = json.loads(get(f"{url}/v1/completions", json.dumps(body).encode()))
    return answer["choices"][0]["text"], answer["specserve"]["drafted"]


def metric(url: str, name: str) -> float:
    text = get(f"{url}/metrics").decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"specserve_{name}"
    )


@pytest.mark.ray
@pytest.mark.slow
def test_two_engines_share_a_draft_that_is_killed_under_load_and_lose_nothing() -> None:
    keys = {**POOL, "target.threads": 1, "draft.threads": 1, "speculation.gamma": 4}
    with served(keys) as (url, config), ThreadPoolExecutor(8) as clients:
        engine = handle(config, "Engine")
        places = engine.places.remote().result(timeout_s=PATIENCE_S)
        until(lambda: metric(url, "pool_engines") == 2)
        expected = [text for text, _ in clients.map(lambda p: complete(url, p), PROMPTS)]
        load = [clients.submit(complete, url, PROMPTS[i % len(PROMPTS)]) for i in range(15)]
        until(lambda: sum(each.done() for each in load) >= 2)
        os.kill(places["draft"].pid, signal.SIGKILL)
        texts = [each.result()[0] for each in load]
        assert texts == [expected[i % len(PROMPTS)] for i in range(15)]

        until(lambda: complete(url, PROMPTS[0])[1] > 0)
        assert complete(url, PROMPTS[0])[0] == expected[0]
        until(lambda: metric(url, "pool_engines") == 2)
        assert metric(url, "pool_rounds_total") > 0
        assert metric(url, "request_failure_total") == 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"draft.pool.devices": 2}, "give it a draft.pool.name"),
        ({**POOL, "draft.pool.name": "a b"}, "draft.pool.name 'a b' must begin"),
        ({**POOL, "draft.kind": "max_gram", "draft.path": None}, "draft.kind is max_gram"),
        ({**POOL, "draft.placement": "together"}, "draft.placement is together"),
        ({**POOL, "draft.learn": True}, "draft.learn trains"),
        ({**POOL, "draft.pool.targets": 1}, "below replicas.max 2"),
        ({**POOL, "draft.pool.devices": 3}, "above the number of engines, 2"),
    ],
)
def test_a_pool_that_cannot_work_is_refused_with_the_key_and_the_remedy(
    keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_keys(keys)


def pooled(**keys: object) -> Config:
    return config_from_keys({**POOL, "target.device": "cpu", "draft.device": "cpu", **keys})


def test_a_device_has_room_for_all_engines_that_it_drafts_for() -> None:
    config = pooled(**{"replicas.max": 5, "draft.pool.devices": 2, "cache.pages": 100})
    assert config.engines_per_draft == 3
    own = pool_draft_config(config, has_gpu=False)
    assert (own.cache.pages, own.limits.max_running) == (300, 3 * config.limits.max_running)
    assert own.draft.device == "cpu"
    auto = pool_draft_config(pooled(**{"draft.device": "cuda"}), has_gpu=True)
    assert auto.draft.device == "cuda:0", "Ray numbers the replica's own GPUs from 0"


def test_two_models_that_name_one_pool_are_refused() -> None:
    own = {"replicas": {"max": 2}, "draft": {"pool": {"name": "shared"}}}
    with pytest.raises(ConfigError, match=r"models a and b both name the draft\.pool shared"):
        config_from_keys({"models": [{"name": "a", **own}, {"name": "b", **own}]})
