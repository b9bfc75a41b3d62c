"""Ray's router by prefixes sends a prompt to the replica whose prefix cache has it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="Ray Serve LLM takes requests in vLLM's classes")

from openai import OpenAI

from tests.ray_llm.served import served
from tests.ray_llm.test_behind_ray_llm import num_cached

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        os.environ.get("RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING") == "1",
        reason="with direct streaming Ray's router by prefixes sees no prompts",
    ),
]

ROUTER = "ray.serve.llm.request_router:PrefixCacheAffinityRouter"


@pytest.fixture
def client() -> Iterator[OpenAI]:
    with served(
        deployment_config={
            "num_replicas": 2,
            "request_router_config": {"request_router_class": ROUTER},
        },
        engine_kwargs={"target.threads": 1, "draft.kind": "none"},
    ) as opened:
        yield opened


def test_a_prompt_that_comes_again_finds_its_pages_on_one_of_two_replicas(client: OpenAI) -> None:
    prompts = ["".join(f"def {name}{i}(x): return {i}\n" for i in range(20)) for name in "abcdef"]
    first = [num_cached(client, prompt) for prompt in prompts]
    again = [num_cached(client, prompt) for prompt in prompts * 2]
    assert first == [0] * len(prompts)
    assert all(again), again
