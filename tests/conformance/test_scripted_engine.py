"""The scripted engine calls, fills and echoes by rules, and follows the grammar it is given."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from specserve.types import Grammar
from tests.conformance.answers import answers, fill
from tests.conformance.scripted_engine import ScriptedEngine, scripted_gateway
from tests.support.http_server import RunningServer
from tests.support.templates import family

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("get_weather", "get_traffic")
]


def prompt_of(*turns: tuple[str, str], tools: list[dict[str, Any]] = TOOLS) -> str:
    messages = [{"role": role, "content": text} for role, text in turns]
    tokenizer = family("hermes")
    ids = tokenizer.apply_chat_template(messages, tools=tools)
    prompt: str = tokenizer._tokenizer.decode(ids, skip_special_tokens=False)
    return prompt


def call_of(name: str, **arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("turns", "answer"),
    [
        ([("user", "Hi 日本")], "Answer 1: you said Hi 日本"),
        (
            [("user", "one"), ("assistant", "1"), ("user", "two")],
            "Answer 2: you said two",
        ),
        (
            [("user", "The weather in Paris for 3 days?")],
            call_of("get_weather", city="Paris", days=3),
        ),
        (
            [("user", "How is traffic in Rome for 2 days?")],
            call_of("get_traffic", city="Rome", days=2),
        ),
        (
            [("user", "weather?"), ("tool", "17"), ("tool", "18")],
            "The result is 17, 18.",
        ),
        (
            [("user", "weather?"), ("tool", "17"), ("assistant", "so"), ("user", "Thanks")],
            "Answer 2: you said Thanks",
        ),
    ],
)
def test_the_first_answer_follows_from_the_last_message(
    turns: list[tuple[str, str]], answer: str
) -> None:
    assert next(answers(prompt_of(*turns))) == answer


def test_tools_that_are_named_are_all_called() -> None:
    (first, *_) = answers(prompt_of(("user", "Call get_weather and get_traffic.")))
    assert first.count("<tool_call>") == 2


def test_without_tools_nothing_is_called() -> None:
    (only,) = answers(prompt_of(("user", "The weather in Paris?"), tools=[]))
    assert only == "Answer 1: you said The weather in Paris?"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer", "maximum": 5}, 5),
        ({"type": "number"}, 36.0),
        ({"type": "string"}, "Ada Lovelace"),
        ({"enum": ["a cat", "Logic"]}, "Logic"),
        ({"enum": ["x", "y"]}, "x"),
        ({"const": 9}, 9),
        ({"type": ["null", "string"]}, None),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, True),
        ({"type": "array", "items": {"type": "integer"}}, [36, 7]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, [36]),
        ({"$ref": "#/$defs/age", "$defs": {"age": {"type": "integer"}}}, 36),
        ({"type": "object"}, {}),
        ({"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]}, {"a": 36}),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 36}),
    ],
)
def test_schemas_are_filled_from_the_text(schema: Mapping[str, Any], value: object) -> None:
    assert fill(schema, "Ada Lovelace is 36 and has 7 books on logic.") == value


def test_words_in_quotation_marks_come_first_and_name_members_of_any_object() -> None:
    text = "Create it for \"你好\" in Rome with 'a' and 'b'."
    assert fill({"type": "string"}, text) == "你好"
    assert list(fill({"type": "object"}, text)) == ["你好", "a", "b"]


@pytest.mark.parametrize(
    ("grammar", "text", "admitted"),
    [
        (Grammar("regex", "ab+"), "abb", True),
        (Grammar("regex", "ab+"), "a", False),
        (Grammar("regex", "ab+"), "abbc", False),
        (Grammar("json_schema", '{"type": "integer"}'), "17", True),
        (Grammar("json_schema", '{"type": "integer"}'), "Hello", False),
    ],
)
def test_a_text_is_admitted_only_whole(grammar: Grammar, text: str, admitted: bool) -> None:
    assert ScriptedEngine().admits(grammar, text) == admitted


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_gateway() as running:
        yield running


def ask(server: RunningServer, content: str, **extra: object) -> Any:
    messages = [{"role": "user", "content": content}]
    return server.ask("/v1/chat/completions", {"model": "demo", "messages": messages, **extra})


def test_a_call_that_is_demanded_is_written_where_nothing_asks_for_it(
    server: RunningServer,
) -> None:
    choice = {"type": "function", "function": {"name": "get_traffic"}}
    reply = ask(server, "Hello.", tools=TOOLS, tool_choice=choice)
    (call,) = reply.json["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_traffic"
    assert set(json.loads(call["function"]["arguments"])) == {"city", "days"}


def test_an_answer_that_the_script_does_not_have_is_an_error_and_no_text(
    server: RunningServer,
) -> None:
    reply = ask(server, "Hello.", guided_regex="x{7}")
    assert reply.status == 500
    assert "the script has no such text" in reply.error["message"]
