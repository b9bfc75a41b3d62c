"""Structured output as the official client requests and parses it, after OpenAI's examples.

A fake engine writes the answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from specserve.grammar.request import NO_FORCING
from specserve.grammar.validate import validate_grammar
from specserve.types import Grammar
from tests.support.http_server import FakeService, RunningServer, serving

CHAT: list[Any] = [{"role": "user", "content": "Alice and Bob meet on Friday."}]


class Event(BaseModel):
    name: str
    date: str
    participants: list[str]


class Step(BaseModel):
    explanation: str
    output: str


class Reasoning(BaseModel):
    steps: list[Step]
    final_answer: str


class Email(BaseModel):
    kind: Literal["email"]
    address: str


class Phone(BaseModel):
    kind: Literal["phone"]
    number: int


class Contact(BaseModel):
    name: str
    reach: Email | Phone | None


class Node(BaseModel):
    label: str
    children: list[Node]


ANSWERS: list[BaseModel] = [
    Event(name="Meeting", date="Friday", participants=["Alice", "Bob"]),
    Reasoning(
        steps=[
            Step(explanation="Take 7 away.", output="8x = -30"),
            Step(explanation="Divide by 8.", output="x = -15/4"),
        ],
        final_answer="x = -15/4",
    ),
    Contact(name="Zoë", reach=Phone(kind="phone", number=5)),
    Contact(name="Outis", reach=None),
    Node(label="root", children=[Node(label="leaf", children=[])]),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(FakeService(), max_context=1024) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    server.service.requests.clear()
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_parse_asks_for_a_schema_and_gives_the_model_back(
    server: RunningServer, client: openai.OpenAI, answer: BaseModel
) -> None:
    server.service.output = answer.model_dump_json()
    completion = client.chat.completions.parse(
        model="demo", messages=CHAT, response_format=type(answer)
    )
    message = completion.choices[0].message
    assert (message.parsed, message.refusal, message.tool_calls) == (answer, None, None)
    (request,) = server.service.requests
    assert request.grammar is not None
    assert request.grammar.kind == "json_schema"
    assert list(json.loads(request.grammar.text)["properties"]) == list(type(answer).model_fields)
    validate_grammar(request.grammar)


@pytest.mark.filterwarnings(
    "ignore:Pydantic serializer warnings"
)  # the client's own, of its own types
def test_a_parsed_message_can_be_sent_back_as_it_is(
    server: RunningServer, client: openai.OpenAI
) -> None:
    server.service.output = ANSWERS[0].model_dump_json()
    message = (
        client.chat.completions.parse(model="demo", messages=CHAT, response_format=Event)
        .choices[0]
        .message
    )
    messages: list[Any] = [*CHAT, message, *CHAT]
    again = client.chat.completions.parse(model="demo", messages=messages, response_format=Event)
    assert again.choices[0].message.parsed == ANSWERS[0]


def test_the_stream_helper_parses_as_it_goes(server: RunningServer, client: openai.OpenAI) -> None:
    server.service.output = ANSWERS[1].model_dump_json()
    with client.chat.completions.stream(
        model="demo", messages=CHAT, response_format=Reasoning
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == ANSWERS[1]
    assert kinds.count("content.delta") > 5
    assert kinds.count("content.done") == 1


def test_a_cut_answer_has_the_finish_reason_length(
    server: RunningServer, client: openai.OpenAI
) -> None:
    server.service.output = ANSWERS[0].model_dump_json()
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="demo", messages=CHAT, response_format=Event, max_tokens=5
        )


def test_a_json_object_is_any_object(server: RunningServer, client: openai.OpenAI) -> None:
    server.service.output = '{"a": 1}'
    answer = client.chat.completions.create(
        model="demo", messages=CHAT, response_format={"type": "json_object"}
    )
    assert json.loads(answer.choices[0].message.content or "") == {"a": 1}
    assert server.service.requests[0].grammar == Grammar("json_schema", '{"type": "object"}')


@pytest.mark.parametrize(
    ("extra", "grammar"),
    [
        ({"guided": {"regex": "[0-9]+"}}, Grammar("regex", "[0-9]+")),
        ({"guided_regex": "[0-9]+"}, Grammar("regex", "[0-9]+")),
        ({"guided_choice": ["a", "b"]}, Grammar("lark", 'start: "a" | "b"')),
        ({"guided_json": {"type": "null"}}, Grammar("json_schema", '{"type": "null"}')),
        ({"guided": {"json": '{"type": "null"}'}}, Grammar("json_schema", '{"type": "null"}')),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"' + NO_FORCING)),
    ],
)
def test_guided_in_either_spelling_reaches_the_engine_from_both_paths(
    server: RunningServer, client: openai.OpenAI, extra: dict[str, Any], grammar: Grammar
) -> None:
    client.chat.completions.create(model="demo", messages=CHAT, extra_body=extra)
    client.completions.create(model="demo", prompt="x", extra_body=extra, n=2)
    assert [request.grammar for request in server.service.requests] == [grammar] * 3


def test_an_unsupported_schema_keyword_is_named_in_the_error(client: openai.OpenAI) -> None:
    schema: Any = {
        "name": "x",
        "strict": True,
        "schema": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
    }
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        client.chat.completions.create(
            model="demo",
            messages=CHAT,
            response_format={"type": "json_schema", "json_schema": schema},
        )
    assert refused.value.param == "response_format"


def test_choices_logprobs_stops_and_usage_are_as_without_a_grammar(
    server: RunningServer, client: openai.OpenAI
) -> None:
    server.service.output = '{"a": "STOP"}'
    answer: Any = client.chat.completions.create(
        model="demo",
        messages=CHAT,
        response_format={"type": "json_object"},
        n=2,
        logprobs=True,
        top_logprobs=1,
        stop="STOP",
        seed=1,
    )
    for choice in answer.choices:
        assert (choice.message.content, choice.finish_reason) == ('{"a": "', "stop")
        assert choice.logprobs is not None
        assert "".join(token.token for token in choice.logprobs.content or []).startswith('{"a": "')
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * len(answer.choices[0].logprobs.content)
