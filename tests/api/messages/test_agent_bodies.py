"""Bodies of `/v1/messages` as agent programs send them are answered, and name what is ignored."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from specserve.api.tokenizer import Tokenizer
from tests.support.http_server import FakeService, Reply, RunningServer, serving
from tests.support.reasoners import reasoner
from tests.support.templates import call_format, family

HELLO: Any = [{"role": "user", "content": "hi"}]
EPHEMERAL: Any = {"type": "ephemeral", "ttl": "1h"}
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string"}},
    "required": ["title"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "schema": SCHEMA}
PROPERTIES: Any = {
    "file_path": {"type": "string", "description": "The absolute path of the file"},
    "offset": {"type": "integer", "minimum": 0, "maximum": 9007199254740991},
    "url": {"type": "string", "format": "uri"},
    "mode": {"type": "string", "enum": ["content", "files", "count"], "default": "files"},
    "answers": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "string"},
    },
    "todos": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {"content": {"type": "string", "minLength": 1}},
            "required": ["content"],
            "additionalProperties": False,
        },
    },
}


def agent_body() -> Any:
    """Return the body of an agent's second turn, with two calls and their results."""
    tools: Any = [
        {
            "name": name,
            "description": f"{name} does what an agent needs.\n\nUsage:\n" + "- read this\n" * 5,
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": PROPERTIES,
                "required": ["file_path"],
                "additionalProperties": False,
            },
            "eager_input_streaming": True,
        }
        for name in (
            *("Task", "Bash", "Glob", "Grep", "Read", "Edit", "Write", "NotebookEdit"),
            *("WebFetch", "TodoWrite", "KillShell", "mcp__files__list_directory"),
        )
    ]
    tools[-1]["cache_control"] = EPHEMERAL
    calls = [
        {"type": "tool_use", "id": f"toolu_0{n}", "name": "Read", "input": {"file_path": f"/{n}"}}
        for n in (1, 2)
    ]
    results = [
        {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": [{"type": "text", "text": f"it is {call['id']}"}],
            "is_error": False,
        }
        for call in calls
    ]
    thinking = {"type": "thinking", "thinking": "Read both.", "signature": ""}
    reminder = "<system-reminder>\nBe careful.\n</system-reminder>"
    return {
        "model": "demo",
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
            {"type": "text", "text": "Rules:\n" + "- keep to it\n" * 80},
            {"type": "text", "text": "Environment: linux", "cache_control": EPHEMERAL},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": reminder},
                    {"type": "text", "text": "Compare them.", "cache_control": EPHEMERAL},
                ],
            },
            {"role": "assistant", "content": [thinking, {"type": "text", "text": "So."}, *calls]},
            {"role": "user", "content": [*results, {"type": "text", "text": reminder}]},
        ],
        "tools": tools,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "metadata": {"user_id": '{"device_id":"' + "a" * 64 + '","session_id":"b"}'},
        "thinking": {"type": "adaptive", "display": "summarized"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "diagnostics": {"previous_message_id": None},
        "service_tier": "auto",
        "temperature": 1.0,
    }


@pytest.fixture
def server() -> Iterator[RunningServer]:
    service = FakeService("Yes.", tokenizer=family("hermes"))
    with serving(
        service, tokenizer=family("hermes"), max_context=32768, vocab_size=4200
    ) as running:
        yield running


def ask(server: RunningServer, **parameters: Any) -> Reply:
    return server.ask("/v1/messages", {"messages": HELLO, "max_tokens": 200, **parameters})


def test_a_turn_of_an_agent_is_answered_with_calls(server: RunningServer) -> None:
    body = agent_body()
    calls = [("Read", '{"file_path": "/3"}'), ("Grep", '{"file_path": "/4", "mode": "count"}')]
    server.service.output = call_format("hermes").format.render(calls)
    temperature = {"temperature": body.pop("temperature")}
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        with client.beta.messages.stream(
            **body, betas=["context-management-2025-06-27"], extra_body=temperature
        ) as stream:
            answer = stream.get_final_message()
        prompt = family("hermes")._tokenizer.decode(server.service.requests[-1].prompt)
    assert answer.stop_reason == "tool_use"
    assert [(block.name, block.input) for block in answer.content if block.type == "tool_use"] == [
        ("Read", {"file_path": "/3"}),
        ("Grep", {"file_path": "/4", "mode": "count"}),
    ]
    parts = ("list_directory", "You are an agent.", "keep to it", "Compare", "toolu_01", "toolu_02")
    assert [part for part in parts if part not in prompt] == []
    assert prompt.count("<|im_start|>tool") == 2


def test_what_is_ignored_of_an_agent_s_body_is_named(server: RunningServer) -> None:
    body = agent_body()
    ignored = "context_management, diagnostics, thinking, output_config.effort"
    body["diagnostics"] = {"previous_message_id": "msg_1"}
    reply = server.ask("/v1/messages?beta=true", body)
    assert (reply.status, reply.headers["x-specserve-ignored"]) == (200, ignored)
    for name in ("max_tokens", "metadata", "diagnostics", "service_tier", "temperature"):
        del body[name]
    count = server.ask("/v1/messages/count_tokens", body)
    assert count.json["input_tokens"] == len(server.service.requests[-1].prompt)
    assert count.headers["x-specserve-ignored"] == ignored.replace("diagnostics, ", "")
    harmless = {"fallbacks": "default", "output_config": {}, "context_management": {}}
    assert "x-specserve-ignored" not in ask(server, **harmless).headers


def test_a_format_constrains_the_text_as_response_format_does(server: RunningServer) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        client.messages.create(
            model="demo", max_tokens=9, messages=HELLO, output_config={"format": FORMAT}
        )
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    server.ask("/v1/chat/completions", {"messages": HELLO, "response_format": named})
    first, second = (request.grammar for request in server.service.requests)
    assert first is not None
    assert first == second


@pytest.mark.parametrize(("effort", "word"), [("low", "low"), ("max", "xhigh")])
def test_a_template_that_reads_the_effort_gets_it(effort: str, word: str) -> None:
    reading = copy.deepcopy(reasoner("optional")._tokenizer)
    reading.chat_template += "{{ reasoning_effort }}"
    service = FakeService("Yes.", tokenizer=Tokenizer(reading))
    with serving(service, tokenizer=service.tokenizer, max_context=2048, vocab_size=4200) as server:
        reply = ask(server, output_config={"effort": effort}, thinking={"type": "adaptive"})
    assert (reply.status, "x-specserve-ignored" in reply.headers) == (200, False)
    assert reading.decode(service.requests[0].prompt).endswith(word)


def test_thinking_that_should_be_omitted_is_shown_and_noted() -> None:
    service = FakeService("Hm.\n</think>\n\nYes.", tokenizer=reasoner("open"))
    with serving(service, tokenizer=reasoner("open"), max_context=2048, vocab_size=4200) as server:
        reply = ask(server, thinking={"type": "adaptive", "display": "omitted"})
    assert reply.headers["x-specserve-ignored"] == "thinking.display"
    assert reply.json["content"][0]["thinking"] == "Hm."
