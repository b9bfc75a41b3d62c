"""Two models of one application: a gateway, and engines of their own for each."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from specserve import LLM, Sampling
from specserve.cluster.launch import handle
from specserve.config.tree import DEMO
from tests.support.ray_server import SharedServe

PROMPT = "def read_lines(path):"
TOKENS = 24
MODELS: list[dict[str, Any]] = [
    {
        "name": "pair",
        "target": {"threads": 1},
        "draft": {"threads": 1, "placement": "together"},
    },
    {"name": "org/alone", "target": {"path": str(DEMO / "draft"), "threads": 1}},
]


def test_each_model_answers_with_its_own_engines_behind_one_gateway(
    shared_serve: SharedServe,
) -> None:
    with shared_serve.served({"models": MODELS, "cache.pages": 64}) as (url, config):
        texts = {
            name: _complete(url, name)[1]["choices"][0]["text"] for name in ("pair", "org/alone")
        }
        status, refusal = _complete(url, "other")
        deployments = {
            name: set(handle(config, f"Engine-{name}").places.remote().result())
            for name in ("pair", "org-alone")
        }
        with urllib.request.urlopen(f"{url}/health") as response:
            health = json.load(response)
        with urllib.request.urlopen(f"{url}/metrics") as response:
            lines = response.read().decode().splitlines()
    assert texts == {
        "pair": _expected(str(DEMO / "target")),
        "org/alone": _expected(str(DEMO / "draft")),
    }
    assert texts["pair"] != texts["org/alone"]
    assert (status, "there are pair, org/alone" in refusal["error"]["message"]) == (404, True)
    assert deployments == {"pair": {"target-0"}, "org-alone": {"target-0"}}
    assert health["models"] == {"pair": "healthy", "org/alone": "healthy"}
    for name in texts:
        assert f'specserve_generation_tokens_total{{model_name="{name}"}} {TOKENS}' in lines
        assert f'specserve_replicas{{model_name="{name}"}} 1' in lines


def _complete(url: str, model: str) -> tuple[int, dict[str, Any]]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def _expected(target: str) -> str:
    plain: dict[str, Any] = {"target.threads": 1, "cache.pages": 64, "draft.kind": "none"}
    with LLM(target, **plain) as llm:
        (output,) = llm.generate([PROMPT], Sampling(max_tokens=TOKENS, temperature=0))
        return output.text
