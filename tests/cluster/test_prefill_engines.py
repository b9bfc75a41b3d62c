"""A prefill engine in a real application: the same texts, also while it is killed under load."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.serve._private.build_app import build_app

from specserve.cluster.app import application
from specserve.cluster.placement import beside_engines, prefill_deployments
from specserve.config.tree import config_from_keys
from tests.support.processes import own_processes_named
from tests.support.ray_server import served

PATIENCE_S = 120.0
PROMPTS = [
    f"import {name}\n" + f"def read_{name}(path):\n    return open(path).read()\n\n" * 12
    for name in ("lines", "words")
]


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


def complete(url: str, prompt: str, salt: str, temperature: float) -> str:
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": 32,
        "temperature": temperature,
        "seed": 1,
        "cache_salt": salt,
    }
    answer = json.loads(get(f"{url}/v1/completions", json.dumps(body).encode()))
    text: str = answer["choices"][0]["text"]
    return text


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
def test_a_prefill_engine_changes_no_text_and_loses_none_when_it_is_killed() -> None:
    keys = {
        "replicas.prefill": 1,
        "replicas.prefill_from": 64,
        "target.threads": 1,
        "draft.threads": 1,
    }
    with served(keys) as (url, _), ThreadPoolExecutor(4) as clients:
        asked = [(prompt, temperature) for prompt in PROMPTS for temperature in (0.0, 1.0)]

        def texts(salt: str) -> list[Any]:
            return [clients.submit(complete, url, prompt, salt, heat) for prompt, heat in asked]

        with_prefill = [one.result() for one in texts("a")]
        until(lambda: metric(url, "prefill_pages_imported_total") > 0)
        assert metric(url, "prefill_fallbacks_total") == 0
        health = json.loads(get(f"{url}/health"))
        assert health["prefill_engines"] == {"demo": {"engines": 1, "healthy": 1}}

        load = texts("b")
        until(lambda: any(one.done() for one in load))
        (replica,) = own_processes_named(":Prefill")
        replica.kill()
        load += texts("c")  # of the next prefill engine, or computed by the engine itself
        assert [one.result() for one in load] == with_prefill * 2
        assert metric(url, "request_failure_total") == 0


def test_each_model_has_prefill_engines_of_its_own_with_their_devices() -> None:
    models = [
        {"name": "small", "replicas": {"prefill": 2}, "target": {"device": "cuda"}},
        {"name": "large"},
    ]
    config = config_from_keys({"models": models})
    built: dict[str, Any] = {
        deployment.name: deployment
        for deployment in build_app(application(config), name=config.name).deployments
    }
    assert set(built) == {"Board", "Engine-small", "Engine-large", "Gateway", "Prefill-small"}
    engine, other, prefill = (
        built[name] for name in ("Engine-small", "Engine-large", "Prefill-small")
    )
    assert engine.init_kwargs["prefill"].deployment_name == "Prefill-small"
    assert "prefill" not in other.init_kwargs
    assert prefill._deployment_config.num_replicas == 2
    assert prefill.init_args[0].draft.kind == "none"
    assert prefill.init_args[3] == "small", "its metrics are those of the model"
    assert built["Board"].init_kwargs["prefill"] == {"small": 2}
    assert set(prefill_deployments(config)) == {"Prefill-small"}
    gpus = [bundle.resources.get("GPU", 0) for bundle in beside_engines(config, has_gpus=True)]
    assert sum(gpus) == 2
