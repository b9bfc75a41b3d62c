"""Clients of Ray Serve LLM whose engine is specserve get the target's text, and clear errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

pytest.importorskip("vllm", reason="Ray Serve LLM takes requests in vLLM's classes")

from openai import APIStatusError, BadRequestError, NotFoundError, OpenAI
from ray import serve

from specserve import LLM, Sampling
from specserve.errors import BadRequest
from tests.ray_llm.served import served
from tests.support.processes import own_processes_named
from tests.support.ray_server import free_port

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


METRICS_PORT = free_port()


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with served(
        deployment_config={"num_replicas": 1},
        engine_kwargs={
            "target": {"threads": 1, "dtype": "float32"},
            "draft": {"threads": 1, "placement": "apart"},
            "speculation.gamma": 3,
        },
        _metrics_export_port=METRICS_PORT,
        _system_config={"metrics_report_interval_ms": 1000},
    ) as opened:
        yield opened


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


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("ray_llm", ("| specserve | ", "| vLLM, draft | ")),
        ("ray_llm_scaling", ("| 4 | ", "| four over one ")),
    ],
)
def test_the_comparisons_run_in_their_tiny_forms(name: str, rows: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", f"lab.bench.{name}", "--quick"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_SERVE")}
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=True)
    assert all(row in done.stdout for row in rows)


def engine() -> Any:
    """Return the handle of the engine, whose deployment has another name with direct streaming."""
    (name,) = (
        name
        for name in serve.status().applications["llm"].deployments
        if "LLMServer" in name or "SpecserveServer" in name
    )
    return serve.get_deployment_handle(name, "llm")


def num_cached(client: OpenAI, prompt: str) -> int:
    answer = client.completions.create(model="demo", prompt=prompt, max_tokens=1, temperature=0)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


def test_a_reset_of_the_prefix_cache_lets_no_earlier_page_be_found(client: OpenAI) -> None:
    prompt = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(20))
    assert num_cached(client, prompt) == 0
    assert num_cached(client, prompt) > 0
    engine().reset_prefix_cache.remote().result()
    assert num_cached(client, prompt) == 0
    assert num_cached(client, prompt) > 0


def test_requests_wait_while_the_engine_is_paused_or_sleeps(
    client: OpenAI, expected: list[str]
) -> None:
    handle = engine()

    def complete() -> str:
        answer = client.completions.create(
            model="demo", prompt=PROMPTS[0], max_tokens=24, temperature=0
        )
        return answer.choices[0].text

    pairs = (("pause", "resume", "is_paused"), ("sleep", "wakeup", "is_sleeping"))
    with ThreadPoolExecutor(1) as threads:
        for stop, go_on, is_stopped in pairs:
            getattr(handle, stop).remote().result()
            assert getattr(handle, is_stopped).remote().result()
            handle.check_health.remote().result()
            waiting = threads.submit(complete)
            with pytest.raises(TimeoutError):
                waiting.result(1)
            assert bool(own_processes_named("ray::TargetWorker")) == (stop == "pause")
            getattr(handle, go_on).remote().result()
            assert waiting.result(60) == expected[0]
            assert not getattr(handle, is_stopped).remote().result()


def test_a_profile_has_the_rounds_between_its_start_and_its_end(client: OpenAI) -> None:
    handle = engine()
    with pytest.raises(BadRequest, match="needs start_profile"):
        handle.stop_profile.remote().result()
    handle.start_profile.remote().result()
    with pytest.raises(BadRequest, match="no round has run"):
        handle.stop_profile.remote().result()
    handle.start_profile.remote().result()
    client.completions.create(model="demo", prompt="x = 1", max_tokens=8, temperature=0)
    events = json.loads(Path(handle.stop_profile.remote().result()).read_text())["traceEvents"]
    rounds = [event["args"] for event in events if event["name"] == "round"]
    assert sum(each["committed"] for each in rounds) == 8


def test_what_cannot_be_done_is_refused_in_a_sentence(client: OpenAI) -> None:
    handle = engine()
    for call, words in (
        (handle.pause.remote(mode="now"), "mode must be one of"),
        (handle.sleep.remote(level=3), "level must be 1 or 2, not 3"),
        (handle.wakeup.remote(tags=["weights"]), "tags must be left out"),
        (handle.collective_rpc.remote("load_weights"), "no worker has a method load_weights"),
    ):
        with pytest.raises(BadRequest, match=words):
            call.result()
    with pytest.raises(APIStatusError, match="writes text only"):
        client.embeddings.create(model="demo", input="x")


def test_routers_and_ray_get_the_figures_of_the_engine(client: OpenAI) -> None:
    stats = engine().record_routing_stats.remote().result()
    assert stats["cached_tokens"] > 0
    assert stats["restarts"] == 0
    url = f"http://127.0.0.1:{METRICS_PORT}/metrics"
    wanted = re.compile(r"ray_specserve_generation_tokens_total\{.*\} [1-9]")
    while True:  # Ray's agent collects them in its own time; the test's limit ends it
        with urlopen(url) as answer:
            lines = answer.read().decode().splitlines()
        found = next((line for line in lines if wanted.match(line)), None)
        if found is not None:
            break
        time.sleep(0.2)
    for label in ('application="llm"', 'deployment="', 'replica="'):
        assert label in found, found
