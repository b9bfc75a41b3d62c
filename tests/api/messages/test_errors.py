"""Errors of `/v1/messages` are Anthropic's, whatever refuses a request, and name what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from specserve.errors import WorkerLost
from tests.support.http_server import FakeService, Reply, RunningServer, serving

HELLO: Any = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [IMAGE]}
BAD_FORMAT = {"type": "json_schema", "schema": {"type": "no type"}}
TOOL_USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


def ask(server: RunningServer, **parameters: Any) -> Reply:
    return server.ask("/v1/messages", {"messages": HELLO, "max_tokens": 20, **parameters})


def error_of(reply: Reply) -> tuple[int, str, str]:
    """Return status, type and message of an error, which must have Anthropic's form."""
    assert set(reply.json) == {"type", "error", "request_id"}
    assert (reply.json["type"], set(reply.json["error"])) == ("error", {"type", "message"})
    assert reply.json["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    assert int(reply.headers["content-length"]) == len(reply.body)
    return reply.status, reply.json["error"]["type"], reply.json["error"]["message"]


def turn(role: str, *blocks: object) -> list[object]:
    return [*HELLO, {"role": role, "content": list(blocks)}]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": turn("user", IMAGE)}, "has the type 'image'"),
        ({"messages": turn("user", RESULT)}, "has the type 'image'"),
        ({"system": [IMAGE]}, "has the type 'image'"),
        ({"messages": turn("user", {"type": "text"})}, "messages[1].content[0].text is needed"),
        ({"messages": turn("assistant", {"type": "tool_use"})}, "content[0].id is needed"),
        ({"messages": turn("user", TOOL_USE)}, "content[0] is a tool_use, which"),
        ({"messages": turn("assistant", TOOL_USE)}, "needs its tool_result"),
        ({"stop_sequences": [""]}, "stop_sequences must be"),
        ({"temperature": -1}, "temperature must be"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking is not supported"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "has no tools of its own"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is needed"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers is not supported"),
        ({"thread": {"type": "create"}}, "thread is not supported"),
        ({"output_config": {"task_budget": {"total": 9}}}, "task_budget is not supported"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": BAD_FORMAT}}, "output_config.format"),
        ({"compaction": {"type": "summarize"}}, "compaction is not supported"),
        ({"stop": ["x"]}, "unknown parameter 'stop'"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "context"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name_and_with_its_reason(
    server: RunningServer, parameters: dict[str, Any], words: str
) -> None:
    status, kind, message = error_of(ask(server, **parameters))
    assert (status, kind) == (400, "invalid_request_error")
    assert words in message


def test_the_names_of_the_errors_are_of_anthropic_s_classes(server: RunningServer) -> None:
    with (
        anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client,
        pytest.raises(anthropic.NotFoundError, match="not served") as caught,
    ):
        client.messages.create(model="other", max_tokens=5, messages=HELLO)
    assert caught.value.type == "not_found_error"
    assert caught.value.request_id == caught.value.response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "method", "status", "kind"),
    [
        ("/v1/messages", "GET", 405, "invalid_request_error"),
        ("/v1/messages/batches", "POST", 404, "not_found_error"),
        ("/v1/messages/count_tokens", "POST", 400, "invalid_request_error"),
    ],
)
def test_errors_of_the_framework_have_the_form_too(
    server: RunningServer, path: str, method: str, status: int, kind: str
) -> None:
    reply = server.ask(path, {} if method == "POST" else None, method=method)
    assert error_of(reply)[:2] == (status, kind)


def test_other_paths_keep_openai_s_form(server: RunningServer) -> None:
    reply = server.ask("/v1/messages_of_old")
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    assert "request-id" not in reply.headers


def test_head_has_the_status_and_no_body(server: RunningServer) -> None:
    reply = server.ask("/v1/messages", method="HEAD")
    assert (reply.status, reply.body) == (405, b"")


@pytest.mark.parametrize(
    ("service", "status", "kind"),
    [
        (FakeService(full=True), 529, "overloaded_error"),
        (FakeService(refusal=WorkerLost("none is left")), 500, "api_error"),
        (FakeService(refusal=RuntimeError("a secret")), 500, "api_error"),
    ],
)
def test_failures_of_the_server_have_the_protocol_s_status(
    service: FakeService, status: int, kind: str
) -> None:
    with serving(service) as server:
        found = error_of(ask(server, stream=True))
    assert found[:2] == (status, kind)
    assert "secret" not in found[2]


def test_a_body_that_is_too_long_is_refused_while_it_is_sent() -> None:
    with serving(config={"limits.max_body_bytes": 2000}) as server:
        reply = ask(server, system="x" * 100_000)
    assert error_of(reply)[:2] == (413, "request_too_large")


def test_keys_may_come_as_clients_of_anthropic_send_them(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("alice k1 requests_per_minute=2\nbob k2\n")
    with serving(config={"http.api_keys_file": str(file)}) as server:

        def send(**headers: str) -> Reply:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            body = {"messages": HELLO, "max_tokens": 5}
            return server.ask("/v1/messages", body, headers=named)

        assert error_of(send())[:2] == (401, "authentication_error")
        assert error_of(send(x_api_key="k3"))[:2] == (401, "authentication_error")
        assert send(x_api_key="k1").status == 200
        assert send(x_api_key="any", authorization="Bearer k1").status == 200
        refused = send(x_api_key="k1")
        assert error_of(refused)[:2] == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        assert send(x_api_key="k2").status == 200, "the limit is a client's own"
