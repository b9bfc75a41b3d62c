"""Reasoning through the official client, streamed or not, beside tools and grammars.

A fake engine writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from tests.support.http_server import FakeService, RunningServer, serving
from tests.support.reasoners import reasoner

CHAT: list[Any] = [{"role": "user", "content": "Is it?"}]
TOOL: Any = {"type": "function", "function": {"name": "look"}}
OUTPUTS = {
    "optional": "<think>\nHm <tool_call>.\n</think>\n\nYes.",
    "open": "Hm <tool_call>.\n</think>\n\nYes.",
    "untokenized": "<think>\nHm <tool_call>.\n</think>\n\nYes.",
    "harmony": "<|channel|>analysis<|message|>Hm <tool_call>.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Yes.",
}


@contextmanager
def reasoning(name: str, output: str) -> Iterator[tuple[RunningServer, openai.OpenAI]]:
    tokenizer = reasoner(name)
    service = FakeService(output=output, tokenizer=tokenizer)
    with (
        serving(service, tokenizer=tokenizer, max_context=2048, vocab_size=4200) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client,
    ):
        yield server, client


@pytest.mark.parametrize("name", OUTPUTS)
def test_reasoning_and_content_come_apart_streamed_or_not(name: str) -> None:
    with reasoning(name, OUTPUTS[name]) as (_, client):
        whole: Any = client.chat.completions.create(model="demo", messages=CHAT)
        chunks: list[Any] = list(
            client.chat.completions.create(model="demo", messages=CHAT, stream=True)
        )
    message, deltas = whole.choices[0].message, [chunk.choices[0].delta for chunk in chunks]
    assert (message.content, message.reasoning_content, message.reasoning) == (
        "Yes.",
        "Hm <tool_call>.",
        "Hm <tool_call>.",
    )
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    parts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(parts) == "Hm <tool_call>."
    assert sum(map(bool, parts)) > 1, "reasoning comes as it is written"
    thought = whole.usage.completion_tokens_details.reasoning_tokens
    assert 3 < thought < whole.usage.completion_tokens


def test_without_known_markers_nothing_changes() -> None:
    with serving(FakeService(output="<think>a</think>b")) as server:
        body = {"messages": CHAT, "max_tokens": 90}
        answer = server.ask("/v1/chat/completions", body).json
        assert answer["choices"][0]["message"]["content"] == "<think>a</think>b"
        assert "completion_tokens_details" not in answer["usage"]
        refused = server.ask("/v1/chat/completions", body | {"thinking_token_budget": 3})
        assert (refused.status, refused.error["param"]) == (400, "thinking_token_budget")


def test_a_text_that_is_cut_in_its_reasoning_has_no_content() -> None:
    with reasoning("open", "Hm, that is long.") as (_, client):
        answer: Any = client.chat.completions.create(model="demo", messages=CHAT, max_tokens=3)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert choice.message.reasoning_content


def test_calls_follow_reasoning_that_mentions_them() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    output = OUTPUTS["open"].removesuffix("Yes.") + call
    with reasoning("open", output) as (server, client):
        answer: Any = client.chat.completions.create(model="demo", messages=CHAT, tools=[TOOL])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert [one.function.name for one in choice.message.tool_calls] == ["look"]
    assert (choice.message.content, choice.message.reasoning_content) == (None, "Hm <tool_call>.")
    grammar = server.service.requests[0].grammar
    assert grammar is not None
    assert f"<[{reasoner('open').added_id('</think>')}]>" in grammar.text
    assert f"<[{reasoner('open').added_id('<tool_call>')}]>" in grammar.text, (
        "a token that is added and not special cannot be spelt"
    )


@pytest.mark.parametrize(
    ("parameters", "is_constrained"),
    [
        ({}, False),
        ({"thinking_token_budget": -1}, False),
        ({"thinking_token_budget": 5}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"guided_choice": ["a", "b"]}, True),
    ],
)
def test_only_what_needs_a_grammar_has_one(
    parameters: dict[str, object], is_constrained: bool
) -> None:
    with reasoning("open", OUTPUTS["open"]) as (server, _):
        body = {"messages": CHAT, "max_tokens": 90, **parameters}
        assert server.ask("/v1/chat/completions", body).status == 200
        assert (server.service.requests[0].grammar is not None) == is_constrained


@pytest.mark.parametrize(
    "parameters",
    [
        {"thinking_token_budget": -2},
        {"thinking_token_budget": "5"},
        {"thinking_token_budget": 5, "ignore_eos": True},
    ],
)
def test_a_wrong_budget_is_refused_by_its_name(parameters: dict[str, object]) -> None:
    with reasoning("open", OUTPUTS["open"]) as (server, _):
        reply = server.ask("/v1/chat/completions", {"messages": CHAT, **parameters})
        assert (reply.status, reply.error["param"]) == (400, "thinking_token_budget")


def test_reasoning_that_is_sent_back_reaches_the_template() -> None:
    talk = [
        *CHAT,
        {"role": "assistant", "content": "Yes.", "reasoning": "Hm.", "refusal": None},
        *CHAT,
    ]
    with reasoning("open", OUTPUTS["open"]) as (server, _):
        server.ask("/v1/chat/completions", {"messages": talk, "max_tokens": 90})
        prompt = reasoner("open")._tokenizer.decode(server.service.requests[0].prompt)
    assert "assistant\nHm.Yes." in prompt
