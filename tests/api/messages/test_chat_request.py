"""Bodies of `/v1/messages` reach the engine as the same chat does, and their tokens are counted."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from specserve.api.tokenizer import Tokenizer
from tests.support.http_server import FakeService, Reply, RunningServer, serving
from tests.support.reasoners import reasoner
from tests.support.templates import family

HELLO: Any = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Any = {"name": "look", "description": "Look.", "input_schema": SCHEMA}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": SCHEMA},
}
NAMED_TOOL = {"type": "function", "function": {"name": "look"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


@pytest.fixture
def server() -> Iterator[RunningServer]:
    service = FakeService("Yes.", tokenizer=family("hermes"))
    with serving(service, tokenizer=family("hermes"), max_context=2048, vocab_size=4200) as running:
        yield running


def ask(server: RunningServer, **parameters: Any) -> Reply:
    return server.ask("/v1/messages", {"messages": HELLO, "max_tokens": 200, **parameters})


@pytest.mark.parametrize(
    ("given", "chat"),
    [
        ({"messages": HELLO, "top_k": 3, "top_p": 0.5, "temperature": 0.7}, {"messages": HELLO}),
        (
            {"system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"messages": [{"role": "system", "content": "a\nb"}, *HELLO]},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look"}},
            {"tools": [CHAT_TOOL], "tool_choice": NAMED_TOOL},
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {}),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {"tools": [CHAT_TOOL]}),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "It is"}]},
            {
                "messages": [*HELLO, {"role": "assistant", "content": "It is"}],
                "continue_final_message": True,
            },
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "text", "text": "So."},
                            {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": 1}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "c1",
                                "content": [{"type": "text", "text": "17"}],
                                "cache_control": {"type": "ephemeral"},
                            },
                            {"type": "text", "text": "Well?"},
                        ],
                    },
                ],
            },
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": "So.", "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": "17"},
                    {"role": "user", "content": "Well?"},
                ],
            },
        ),
    ],
)
def test_the_engine_gets_the_request_of_the_same_chat(
    server: RunningServer, given: Any, chat: Any
) -> None:
    sampling = {name: given[name] for name in ("top_k", "top_p", "temperature") if name in given}
    reply = ask(server, seed=1, **given)
    body = {"messages": HELLO, "max_tokens": 200, "seed": 1, **sampling, **chat}
    answer = server.ask("/v1/chat/completions", body).json
    first, second = server.service.requests
    assert first == second
    assert reply.json["content"][0]["text"] == answer["choices"][0]["message"]["content"]
    counted = {name: given[name] for name in given if name not in sampling}
    count = server.ask("/v1/messages/count_tokens", {"messages": HELLO, **counted})
    assert count.json == {"input_tokens": len(first.prompt)}
    assert reply.json["usage"]["input_tokens"] == len(first.prompt)


def test_speculation_is_set_as_in_other_requests(server: RunningServer) -> None:
    ask(server, speculation={"gamma": 3, "verifier": "block"}, priority=-1, cache_salt="s")
    request = server.service.requests[-1]
    assert (request.speculation.gamma, request.priority) == (3, -1)


def test_values_that_change_nothing_are_taken(server: RunningServer) -> None:
    harmless = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "thinking": {"type": "disabled"},
        "tools": [],
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    body = {"messages": HELLO, "max_tokens": 200, **harmless}
    reply = server.ask("/v1/messages", body, headers=headers)
    assert (reply.status, reply.json["stop_reason"]) == (200, "end_turn")


@pytest.mark.parametrize(
    ("thinking", "limit"),
    [
        ({"type": "enabled", "budget_tokens": 7}, "{0,7}"),
        ({"type": "disabled"}, ""),
        ({"type": "adaptive"}, None),
        (None, None),
    ],
)
def test_thinking_has_the_limit_that_is_given(thinking: Any, limit: str | None) -> None:
    service = FakeService("Hm.\n</think>\n\nYes.", tokenizer=reasoner("open"))
    with serving(service, tokenizer=reasoner("open"), max_context=2048, vocab_size=4200) as server:
        assert ask(server, thinking=thinking).status == 200
    grammar = service.requests[0].grammar
    if limit is None:
        assert grammar is None
        return
    assert grammar is not None
    end = f"<[{reasoner('open').added_id('</think>')}]>"
    (body,) = (line for line in grammar.text.splitlines() if line.startswith("body:"))
    assert body.endswith(f"{limit} {end}")
    assert ("{0," in body) == bool(limit)


@pytest.mark.parametrize(("kind", "is_on"), [("enabled", True), ("disabled", False)])
def test_a_template_with_a_switch_gets_it(kind: str, is_on: bool) -> None:
    switched = copy.deepcopy(reasoner("optional")._tokenizer)
    switched.chat_template += "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    service = FakeService("Yes.", tokenizer=Tokenizer(switched))
    with serving(service, tokenizer=service.tokenizer, max_context=2048, vocab_size=4200) as server:
        assert ask(server, thinking={"type": kind}).status == 200
    prompt = switched.decode(service.requests[0].prompt)
    assert prompt.endswith("</think>\n\n") != is_on
    assert service.requests[0].grammar is None
