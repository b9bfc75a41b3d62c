"""A draft pool in a real application: two models, and drafts that come and die under load."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from prometheus_client.parser import text_string_to_metric_families

from specserve.cluster.launch import handle
from specserve.config.tree import DEMO
from tests.support.ray_server import SharedServe

PATIENCE_S = 120.0
PROMPTS = [f"def read_{name}(path):\n" for name in ("lines", "words", "bytes", "rows", "keys")]


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


def complete(url: str, model: str, prompt: str) -> tuple[str, int]:
    """Return the text of a prompt, and how many draft tokens of it were verified."""
    body = {"prompt": prompt, "max_tokens": 96, "temperature": 0, "model": model}
    answer = json.loads(get(f"{url}/v1/completions", json.dumps(body).encode()))
    return answer["choices"][0]["text"], answer["specserve"]["drafted"]


def readings(url: str, name: str) -> list[float]:
    """Return all samples of a metric, one for each device of a pool."""
    text = get(f"{url}/metrics").decode()
    return [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"specserve_{name}"
    ]


def test_two_models_share_a_pool_that_grows_and_is_killed_under_load_and_lose_nothing(
    shared_serve: SharedServe,
) -> None:
    pool = {"name": "shared", "max_devices": 2, "target_busy": 0.01}
    own = {"draft": {"path": str(DEMO / "draft"), "threads": 1, "pool": pool}}
    names = ("target", "draft")
    models = [
        {"name": name, "target": {"path": str(DEMO / name), "threads": 1}, **own} for name in names
    ]
    asked = [(model, prompt) for prompt in PROMPTS for model in names]
    replicas = {"upscale_delay_s": 0.5, "downscale_delay_s": 600}
    keys = {"models": models, "replicas": replicas, "speculation.gamma": 4, "cache.pages": 256}
    with shared_serve.served(keys) as (url, config), ThreadPoolExecutor(8) as clients:
        until(lambda: readings(url, "pool_engines") == [2.0])
        expected = [text for text, _ in clients.map(lambda one: complete(url, *one), asked)]

        def texts_while(happens: Callable[[], object]) -> list[str]:
            """Return the texts of all prompts, twice; most are written while it happens."""
            load = [clients.submit(complete, url, *each) for each in asked * 2]
            until(lambda: sum(each.done() for each in load) >= 2)
            happens()
            return [each.result()[0] for each in load]

        moved = texts_while(lambda: until(lambda: readings(url, "pool_engines") == [1.0, 1.0]))
        assert moved == expected * 2

        engine = handle(config, "Engine-target")
        draft = engine.places.remote().result(timeout_s=PATIENCE_S)["draft"]
        assert texts_while(lambda: os.kill(draft.pid, signal.SIGKILL)) == expected * 2
        for one, text in zip(asked[:2], expected, strict=False):
            until(lambda one=one: complete(url, *one)[1] > 0)  # type: ignore[misc]
            assert complete(url, *one)[0] == text
        until(lambda: sum(readings(url, "pool_engines")) == 2)
        assert sum(readings(url, "pool_rounds_total")) > 0
        assert sum(readings(url, "request_failure_total")) == 0


def test_two_devices_draft_for_one_engine_and_texts_stay_when_one_is_killed(
    shared_serve: SharedServe,
) -> None:
    pool = {"name": "both", "devices": 2, "devices_per_engine": 2}
    keys = {
        "target": {"path": str(DEMO / "target"), "threads": 1},
        "draft": {"path": str(DEMO / "draft"), "threads": 1, "pool": pool},
        "speculation.gamma": 4,
        "cache.pages": 256,
    }
    with shared_serve.served(keys) as (url, config), ThreadPoolExecutor(8) as clients:
        until(lambda: readings(url, "pool_engines") == [1.0, 1.0])

        def texts() -> list[tuple[str, int]]:
            return list(clients.map(lambda prompt: complete(url, config.model, prompt), PROMPTS))

        expected = texts()
        assert all(drafted for _, drafted in expected)
        health = json.loads(get(f"{url}/health"))
        assert health["draft_placement"] == "apart, in 2 devices of the pool both"
        places = handle(config, "Engine").places.remote().result(timeout_s=PATIENCE_S)
        assert sorted(places) == ["draft-0", "draft-1", "target-0"]
        assert places["draft-0"].pid != places["draft-1"].pid
        os.kill(places["draft-1"].pid, signal.SIGKILL)
        for _ in range(2):
            assert [text for text, _ in texts()] == [text for text, _ in expected]
        until(lambda: readings(url, "pool_engines") == [1.0, 1.0])
        until(
            lambda: (
                "draft-1" in handle(config, "Engine").places.remote().result(timeout_s=PATIENCE_S)
            )
        )
        again = texts()
        assert all(drafted for _, drafted in again)
        assert [text for text, _ in again] == [text for text, _ in expected]
