"""Tools and calls through the official client, streamed or not, in every family's format.

A fake engine writes the calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from llguidance import LLMatcher
from pydantic import BaseModel

from specserve.api.tools.arguments import ArgumentStyle, render_arguments
from tests.support.http_server import FakeService, RunningServer, serving
from tests.support.templates import FAMILIES, call_format, family

CHAT: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Of a city.",
        "parameters": SCHEMA,
        "strict": True,
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
PARIS, ROME = (
    ("get_weather", '{"city": "Paris", "unit": "C"}'),
    ("get_weather", '{"city": "Rome \\"}", "unit": "F"}'),
)


class GetWeather(BaseModel):
    city: str
    unit: str


@contextmanager
def calling(
    name: str, *calls: tuple[str, str], before: str = ""
) -> Iterator[tuple[RunningServer, openai.OpenAI]]:
    """Serve a model that writes these calls."""
    output = before + call_format(name).format.render(list(calls)) if calls else before
    service = FakeService(output=output, tokenizer=family(name))
    with (
        serving(service, tokenizer=family(name), max_context=2048, vocab_size=4200) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client,
    ):
        yield server, client


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_is_answered_and_followed_by_a_turn_with_its_result(name: str) -> None:
    with calling(name, PARIS) as (server, client):
        first: Any = client.chat.completions.create(
            model="demo", messages=CHAT, tools=[WEATHER, TIME]
        )
        choice = first.choices[0]
        assert (choice.finish_reason, choice.message.content, choice.message.refusal) == (
            "tool_calls",
            None,
            None,
        )
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name, call.function.arguments, call.id[:5]) == (
            "function",
            *PARIS,
            "call_",
        )
        server.service.output = "It is 17 degrees."
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "17"}
        second = client.chat.completions.create(
            model="demo", messages=[*CHAT, choice.message, result], tools=[WEATHER, TIME]
        )
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == (
            "It is 17 degrees.",
            "stop",
        )
        assert second.choices[0].message.tool_calls is None
        prompts = [
            family(name)._tokenizer.decode(request.prompt) for request in server.service.requests
        ]
        if name != "mistral_named":  # a template of one line, which shows no calls
            style = call_format(name).format.arguments
            assert render_arguments(style, PARIS[1]) in prompts[1]
            assert "17" in prompts[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_streamed_call_has_its_name_first_and_then_pieces_of_its_arguments(name: str) -> None:
    with calling(name, PARIS) as (_, client):
        chunks: list[Any] = list(
            client.chat.completions.create(
                model="demo", messages=CHAT, tools=[WEATHER], stream=True
            )
        )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert not any(delta.content for delta in deltas)
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    assert {piece.index for piece in pieces} == {0}
    assert (pieces[0].function.name, pieces[0].type, bool(pieces[0].id)) == (
        "get_weather",
        "function",
        True,
    )
    assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])
    assert "".join(piece.function.arguments for piece in pieces) == PARIS[1]
    assert len(pieces) > 3, "arguments come as they are output"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "tool_calls"
    ]


@pytest.mark.parametrize("name", ["plain", "mistral", "mistral_named"])
def test_text_before_calls_is_content_and_calls_may_be_parallel(name: str) -> None:
    with calling(name, PARIS, ROME, before="Let me see.\n") as (_, client):
        answer: Any = client.chat.completions.create(model="demo", messages=CHAT, tools=[WEATHER])
        whole = answer.choices[0]
        stream: Any = client.chat.completions.create(
            model="demo", messages=CHAT, tools=[WEATHER], stream=True
        )
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert (
        whole.message.content == "".join(delta.content or "" for delta in deltas) == "Let me see.\n"
    )
    assert [(call.function.name, call.function.arguments) for call in whole.message.tool_calls] == [
        PARIS,
        ROME,
    ]
    assert len({call.id for call in whole.message.tool_calls}) == 2
    for index, (_, arguments) in enumerate((PARIS, ROME)):
        assert (
            "".join(
                piece.function.arguments
                for delta in deltas
                for piece in delta.tool_calls or []
                if piece.index == index
            )
            == arguments
        )


def test_parse_gives_the_arguments_as_a_model_and_its_message_can_be_sent_back() -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    with calling("hermes", ("GetWeather", PARIS[1])) as (server, client):
        answer: Any = client.chat.completions.parse(model="demo", messages=CHAT, tools=[tool])
        message = answer.choices[0].message
        assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Paris", unit="C")
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "17"}
        server.service.output = "17"
        again = client.chat.completions.parse(
            model="demo", messages=[*CHAT, message, result], tools=[tool]
        )
        assert again.choices[0].message.content == "17"


def test_the_stream_helper_reports_arguments_and_their_end() -> None:
    tools = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    with (
        calling("hermes", PARIS, ROME, before="So: ") as (_, client),
        client.chat.completions.stream(model="demo", messages=CHAT, tools=tools) as stream,
    ):
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.arguments for event in done] == [PARIS[1], ROME[1]]
    assert [event.parsed_arguments for event in done] == [
        GetWeather(city="Paris", unit="C"),
        GetWeather(city='Rome "}', unit="F"),
    ]
    assert sum(event.type == "tool_calls.function.arguments.delta" for event in events) > 5
    assert (final.finish_reason, final.message.content) == ("tool_calls", "So: ")


def test_a_parsed_answer_may_be_a_schema_or_a_call() -> None:
    class Answer(BaseModel):
        degrees: int

    tool = openai.pydantic_function_tool(GetWeather)
    with calling("plain", before='{"degrees": 17}') as (server, client):
        message = (
            client.chat.completions.parse(
                model="demo", messages=CHAT, tools=[tool], response_format=Answer
            )
            .choices[0]
            .message
        )
        assert (message.parsed, message.tool_calls) == (Answer(degrees=17), None)
        grammar = server.service.requests[0].grammar
        assert grammar is not None
        assert "degrees" in grammar.text
    with (
        calling("llama") as (_, client),
        pytest.raises(openai.BadRequestError, match="response_format and tools"),
    ):
        client.chat.completions.parse(
            model="demo", messages=CHAT, tools=[tool], response_format=Answer
        )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("options", "may_start_with_text", "num_functions", "parallel"),
    [
        ({}, True, 2, True),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, True, 2, False),
        ({"tool_choice": "required"}, False, 2, True),
        ({"tool_choice": {"type": "function", "function": {"name": "get_time"}}}, False, 1, False),
    ],
)
def test_the_choice_of_tools_becomes_a_grammar_that_can_be_obeyed(
    name: str,
    options: dict[str, Any],
    may_start_with_text: bool,
    num_functions: int,
    parallel: bool,
) -> None:
    with calling(name, PARIS) as (server, client):
        client.chat.completions.create(
            model="demo", messages=CHAT, tools=[WEATHER, TIME], **options
        )
        (request,) = server.service.requests
    assert request.grammar is not None
    text = request.grammar.text
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(text)) == ""
    assert ("TEXT" in text) == may_start_with_text
    form = call_format(name).format
    if form.arguments is ArgumentStyle.JSON:
        assert text.count("%json") == num_functions
    assert ("get_weather" in text, "get_time" in text) == (num_functions == 2, True)
    assert ("call)*" in text) == (parallel and form.next_prefix is not None)


def test_tools_that_may_not_be_called_are_not_shown_and_their_markers_are_text() -> None:
    with calling("hermes", PARIS) as (server, client):
        choice = client.chat.completions.create(
            model="demo", messages=CHAT, tools=[WEATHER], tool_choice="none"
        ).choices[0]
        assert choice.message.content == call_format("hermes").format.render([PARIS])
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        (request,) = server.service.requests
        assert request.grammar is None
        assert request.prompt == family("hermes").apply_chat_template(CHAT)


def test_a_cut_call_has_the_finish_reason_length() -> None:
    with calling("plain", PARIS) as (_, client):
        answer: Any = client.chat.completions.create(
            model="demo", messages=CHAT, tools=[WEATHER], max_tokens=35
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "length"
        assert PARIS[1].startswith(choice.message.tool_calls[0].function.arguments)
        assert choice.message.tool_calls[0].function.arguments != PARIS[1]


def test_choices_logprobs_usage_and_origins_are_as_without_tools() -> None:
    with calling("plain", PARIS) as (server, client):
        answer: Any = client.chat.completions.create(
            model="demo", messages=CHAT, tools=[WEATHER], n=2, logprobs=True
        )
        assert [len(choice.message.tool_calls) for choice in answer.choices] == [1, 1]
        assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 2
        tokens = [len(choice.logprobs.content) for choice in answer.choices]
        assert answer.usage.completion_tokens == sum(tokens)
        body = {
            "messages": CHAT,
            "tools": [WEATHER],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        *chunks, last = server.ask(
            "/v1/chat/completions", body, headers={"X-Specserve-Origins": "1"}
        ).events
        assert (
            sum(len(chunk["origins"]) for chunk in chunks)
            == last["usage"]["completion_tokens"]
            == tokens[0]
        )


def test_tools_have_limits() -> None:
    def tool(number: int, size: int = 0) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {
                "name": f"f{number}",
                "description": "d" * size,
                "parameters": {"const": {"a": "x" * size}},
            },
        }

    with calling("plain", PARIS) as (server, _):
        for tools, param in (
            ([tool(i) for i in range(129)], "tools"),
            ([tool(0, 70_000)], "tools"),
            ([tool(0, 300_000)], "tools[0].function.parameters"),
            ([tool(i, 30_000) for i in range(3)], "tools"),
            (
                [{"type": "function", "function": {"name": "f", "description": "x" * 100_000}}],
                "messages",
            ),
        ):
            reply = server.ask("/v1/chat/completions", {"messages": CHAT, "tools": tools})
            assert (reply.status, reply.error["param"]) == (400, param)
        assert not server.service.requests


def test_calls_in_the_history_need_no_tools_in_the_request() -> None:
    history = [
        *CHAT,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
    ]
    with calling("plain", before="Well.") as (server, client):
        answer = client.chat.completions.create(
            model="demo",
            messages=[*history, {"role": "tool", "tool_call_id": "1", "content": "17"}],
        )
        assert answer.choices[0].message.content == "Well."
        prompt = family("plain").decode(server.service.requests[0].prompt)
    assert prompt.splitlines()[1:] == [
        "assistant: <tool_call>",
        json.dumps({"name": "f", "arguments": {}}),
        "</tool_call>",
        "tool: 17",
        "assistant:",
    ]
