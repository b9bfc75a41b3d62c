"""The small endpoints, and the pages that describe the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specserve import __version__
from specserve.api import probes
from specserve.api.service import PoolStatus, Status
from specserve.errors import WorkerLost
from specserve.metrics import Registry
from tests.support.http_server import (
    CONTEXT,
    TEXT,
    FakeService,
    RunningServer,
    demo_tokenizer,
    serving,
)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


def test_the_official_client_finds_the_model(server: RunningServer) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        (listed,) = client.models.list()
        found = client.models.retrieve("demo")
        assert (listed.id, listed.object, listed.created, listed.owned_by) == (
            "demo",
            "model",
            1,
            "specserve",
        )
        assert found == listed
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("org/other")


def test_text_becomes_tokens_and_tokens_text(server: RunningServer) -> None:
    ids = list(demo_tokenizer().encode(TEXT))
    assert server.ask("/tokenize", {"prompt": TEXT}).json == {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": CONTEXT,
    }
    assert server.ask("/tokenize", {"prompt": TEXT, "add_special_tokens": False}).json[
        "tokens"
    ] == list(demo_tokenizer().encode(TEXT, special=False))
    assert server.ask("/detokenize", {"tokens": ids}).json == {"prompt": TEXT}
    chat = [{"role": "user", "content": "hi"}]
    assert server.ask("/tokenize", {"messages": chat}).json["tokens"] == list(
        demo_tokenizer().apply_chat_template(chat)
    )
    assert server.ask("/tokenize", {"prompt": ""}).json["count"] == 0
    special = min(demo_tokenizer().special_ids)
    named = demo_tokenizer().token_name(special)
    assert named
    assert server.ask("/detokenize", {"tokens": [special, *ids]}).json == {"prompt": named + TEXT}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
    ],
)
def test_invalid_tokenize_and_detokenize_requests_are_refused(
    server: RunningServer, path: str, body: dict[str, object], param: str
) -> None:
    reply = server.ask(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("status", "health", "ready"),
    [
        (Status(ready=True, healthy=True), 200, 200),
        (Status(ready=False, healthy=True, why="loading weights"), 200, 503),
        (Status(ready=False, healthy=False, why="rank 1 hangs"), 503, 503),
    ],
)
def test_health_and_readiness_say_what_is_wrong(status: Status, health: int, ready: int) -> None:
    with serving(FakeService(state=status)) as server:
        replies = {path: server.ask(path) for path in ("/health", "/ready")}
        assert [reply.status for reply in replies.values()] == [health, ready]
        for reply in replies.values():
            if reply.status == 503:
                assert reply.error["message"] == status.why
                assert reply.headers["retry-after"]


def test_health_says_how_many_devices_a_draft_pool_has_and_how_busy_they_are() -> None:
    pools = (PoolStatus("shared", devices=2, engines=3, busy=0.41257),)
    state = Status(ready=True, healthy=True, pools=pools)
    with serving(FakeService(state=state)) as server:
        reply = server.ask("/health")
    assert reply.json["draft_pools"] == {"shared": {"devices": 2, "engines": 3, "busy": 0.413}}


def test_devices_that_are_avoided_stand_in_the_health_of_a_server_that_is_well() -> None:
    troubles = ("GPU 3 of node a1 has failed and is avoided",)
    state = Status(ready=True, healthy=True, device_troubles=troubles)
    with serving(FakeService(state=state)) as server:
        reply = server.ask("/health")
    assert (reply.status, reply.json) == (200, {"status": "healthy", "devices": troubles[0]})


def test_health_says_whether_texts_depend_on_what_else_is_served_and_why() -> None:
    state = Status(ready=True, healthy=True, replicas=2, irreproducible=("experts", "a GPU"))
    with serving(FakeService(state=state)) as server:
        health = server.ask("/health").json
    assert health == {
        "status": "healthy",
        "reproducible": False,
        "irreproducible": "experts; a GPU",
    }


class UnhealthyService(FakeService):
    async def status(self) -> Status:
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("error", [None, WorkerLost("no engine answers")])
def test_an_engine_without_status_is_unhealthy_and_metrics_go_on(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "STATUS_TIMEOUT_S", 0.1)
    with serving(UnhealthyService(error=error)) as server:
        assert [server.ask(path).status for path in ("/health", "/ready", "/metrics")] == [
            503,
            503,
            200,
        ]


def test_metrics_are_the_gateways_and_all_replicas_together() -> None:
    replicas = []
    for preemptions in (2, 3):
        registry = Registry()
        registry.counter("preemptions_total").add(preemptions)
        replicas.append(registry.snapshot())
    state = Status(ready=True, healthy=True, replicas=2, metrics=tuple(replicas))
    with serving(FakeService(state=state)) as server:
        server.ask("/v1/completions", {"prompt": "hello", "max_tokens": 5, "n": 2})
        server.ask("/v1/completions", {"prompt": "hello", "max_tokens": 0})
        reply = server.ask("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    read = {
        (sample.name.removeprefix("specserve_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }
    assert read[("preemptions_total",)] == 5
    assert (read[("replicas",)], read[("min_replicas",)]) == (2, 1)
    own = server.registry.snapshot().samples["replicas"]
    assert own.get((), (0.0,))[0] == 0, "other gateways would add it to theirs"
    assert read[("prompt_tokens_total",)] == len(demo_tokenizer().encode("hello"))
    assert read[("generation_tokens_total",)] == 10
    assert read[("request_success_total", "length")] == 2
    assert read[("request_failure_total", "400")] == 1
    assert read[("vllm:generation_tokens_total", "demo", "0")] == 10
    counted = [
        read[(name + "_count",)]
        for name in (
            "time_to_first_token_seconds",
            "time_to_first_token_engine_seconds",
            "time_to_first_token_framework_seconds",
            "time_per_output_token_seconds",
            "inter_token_latency_seconds",
            "e2e_request_latency_seconds",
        )
    ]
    assert counted == [2, 2, 2, 2, 4, 2]  # five tokens come in three chunks: 1, 3 and 1
    assert (
        0 < read[("time_to_first_token_seconds_sum",)] <= read[("e2e_request_latency_seconds_sum",)]
    )


def test_vllms_names_can_be_left_out() -> None:
    with serving(config={"http": {"vllm_metrics": False}}) as server:
        assert b"vllm:" not in server.ask("/metrics").body
    with serving() as server:
        server.ask("/v1/completions", {"prompt": "hello", "max_tokens": 5})
        assert b"vllm:inter_token_latency_seconds_count" in server.ask("/metrics").body


def test_the_trace_is_the_services(server: RunningServer) -> None:
    assert server.ask("/trace").json == {"traceEvents": []}


def test_the_openapi_page_names_every_path_and_parameter_of_the_contract(
    server: RunningServer,
) -> None:
    page = server.ask("/openapi.json").json
    assert set(page["paths"]) >= {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/metrics",
    }
    shapes = page["components"]["schemas"]
    common = {
        *(
            "model",
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "n",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "seed",
        ),
        *(
            "logprobs",
            "top_logprobs",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
            "response_format",
            "stream",
        ),
        *("stream_options", "user", "speculation"),
    }
    assert set(shapes["CompletionBody"]["properties"]) >= common | {"prompt", "echo"}
    assert set(shapes["ChatBody"]["properties"]) >= common | {"messages"}
    assert "422" not in page["paths"]["/v1/completions"]["post"]["responses"]


def test_the_release_is_shown_and_a_ping_is_a_health_check(server: RunningServer) -> None:
    assert server.ask("/version").json == {"version": __version__}
    well = {"status": "healthy", "reproducible": True}
    assert server.ask("/ping").json == server.ask("/health").json == well
    assert server.ask("/ping", method="POST").status == 200
    with serving(FakeService(state=Status(ready=False, healthy=False, why="it hangs"))) as ill:
        for method in ("GET", "POST"):
            reply = ill.ask("/ping", method=method)
            assert (reply.status, reply.error["message"]) == (503, "it hangs")


@pytest.mark.parametrize("path", ["/", "/docs", "/health", "/ready", "/v1/models", "/v1/nothing"])
def test_head_has_the_status_and_headers_of_get_and_no_body(
    server: RunningServer, path: str
) -> None:
    get, head = server.ask(path), server.ask(path, method="HEAD")
    kept = ("content-type", "content-length")
    assert (head.status, head.body) == (get.status, b"")
    assert [head.headers[name] for name in kept] == [get.headers[name] for name in kept]


def test_head_of_a_path_that_is_only_posted_to_is_refused(server: RunningServer) -> None:
    head = server.ask("/v1/completions", method="HEAD")
    assert (head.status, head.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/audio/speech", "/v1/images/generations", "/v1/rerank"]
)
def test_paths_for_anything_but_text_are_a_404_that_says_so(
    server: RunningServer, path: str
) -> None:
    reply = server.ask(path, {"model": "demo", "input": "hello"})
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    assert path in reply.error["message"]
    assert "text only" in reply.error["message"]
