"""Clients of Ray Serve LLM whose engine is specserve get the target's text, and clear errors."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm", reason="Ray Serve LLM takes requests in vLLM's classes")

import ray
from openai import BadRequestError, NotFoundError, OpenAI
from ray import serve

from specserve import LLM, Sampling
from tests.support.processes import own_processes_named

pytestmark = pytest.mark.long

PROMPTS = ["import os\n", "class A:\n    def f(self"]
MESSAGES: list[Any] = [{"role": "user", "content": "def add(a, b):"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    from ray.serve.llm import LLMConfig, build_openai_app

    port = free_port()
    ray.init(num_cpus=8, include_dashboard=False, logging_level=logging.ERROR)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        config = LLMConfig(
            model_loading_config={"model_id": "demo"},
            server_cls="specserve.features.ray_serve_llm.server:SpecserveServer",
            deployment_config={"num_replicas": 1},
            engine_kwargs={
                "target": {"threads": 1, "dtype": "float32"},
                "draft": {"threads": 1, "placement": "apart"},
                "speculation.gamma": 3,
            },
        )
        serve.run(build_openai_app({"llm_configs": [config]}), name="llm", route_prefix="/")
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as opened:
            yield opened
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Return the texts of the target alone."""
    keys: dict[str, Any] = {"draft.kind": "none", "target.dtype": "float32", "cache.pages": 64}
    with LLM(**keys) as llm:
        greedy = Sampling(max_tokens=24, temperature=0)
        return [output.text for output in llm.generate(PROMPTS, greedy)]


def test_greedy_texts_are_those_of_the_target_alone(client: OpenAI, expected: list[str]) -> None:
    for prompt, text in zip(PROMPTS, expected, strict=True):
        asked: Any = {"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0}
        answer = client.completions.create(**asked)
        assert answer.choices[0].text == text
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 24
        pieces = client.completions.create(**asked, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == text
    together = client.completions.create(
        model="demo", prompt=PROMPTS, max_tokens=24, temperature=0, extra_body={"top_k": -1}
    )
    assert [choice.text for choice in together.choices] == expected


def test_a_chat_is_the_same_streamed_or_not(client: OpenAI) -> None:
    asked: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    pieces = client.chat.completions.create(**asked, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert text


def test_tools_and_json_follow_their_schemas(client: OpenAI) -> None:
    called = client.chat.completions.create(
        model="demo", messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=64
    )
    (call,) = called.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments)["a"] in (1, 2)
    schema: Any = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}},
    }
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, response_format=schema, max_tokens=32
    )
    assert json.loads(answer.choices[0].message.content or "") in ("yes", "no")


def test_sampling_is_seeded_and_logprobs_are_there(client: OpenAI) -> None:
    asked: Any = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 8, "seed": 7, "logprobs": 2}
    first, second = (client.completions.create(**asked).choices[0] for _ in range(2))
    assert first.text == second.text
    assert first.logprobs is not None
    assert first.logprobs.token_logprobs is not None
    assert len(first.logprobs.token_logprobs) == 8


def test_mistakes_are_answered_by_the_engine_or_the_router(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match=r"gamma must be at most 16, not 99"):
        client.completions.create(
            model="demo", prompt="x", extra_body={"speculation": {"gamma": 99}}
        )
    with pytest.raises(BadRequestError, match="max_tokens"):
        client.completions.create(model="demo", prompt="x", max_tokens=-1)
    with pytest.raises(NotFoundError):
        client.completions.create(model="another", prompt="x")


def test_the_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]


def test_a_worker_that_dies_in_mid_stream_loses_nothing(client: OpenAI) -> None:
    asked: Any = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 200, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**asked).choices[0].text
    pieces = iter(client.completions.create(**asked, stream=True))
    text = next(pieces).choices[0].text
    (target,) = own_processes_named("ray::TargetWorker")
    psutil.Process(target.pid).kill()
    text += "".join(piece.choices[0].text for piece in pieces if piece.choices)
    assert text == whole


def test_direct_streaming_is_what_this_run_was_asked_for() -> None:
    from ray.llm._internal.serve.constants import RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING as direct

    assert direct == (os.environ.get("RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING") == "1")


def test_the_comparison_with_vllm_runs_in_its_tiny_form() -> None:
    command = [sys.executable, "-m", "lab.bench.ray_llm", "--quick"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_SERVE")}
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=True)
    assert "| specserve | " in done.stdout
    assert "| vLLM, draft | " in done.stdout
