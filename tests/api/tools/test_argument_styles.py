"""Arguments in tags and keywords become JSON of the schema's types, however they are cut."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from specserve.api.reasoning.formats import ModelReasoning, PromptReasoning, PromptState
from specserve.api.reasoning.grammar import reasoning_grammar
from specserve.api.tools.formats import FORMATS
from specserve.api.tools.grammar import CallGrammar
from specserve.api.tools.offer import SEPARATORS
from specserve.api.tools.parameters import parse_parameters
from specserve.api.tools.parse import CallParser, merge_deltas
from specserve.errors import BadValue
from specserve.types import Grammar
from tests.api.tools.test_grammar import admits, draw_text
from tests.api.tools.test_tools import CHAT, TIME, WEATHER
from tests.support.http_server import FakeService, serving
from tests.support.templates import call_format, family

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "unit": {"$ref": "#/$defs/Unit"},
        "short": {"type": "string", "minLength": 2, "maxLength": 3},
        "day": {"type": "string", "pattern": "^[0-9]{2}$"},
        "many": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "is_new": {"type": "boolean"},
        "any": {"type": ["integer", "null"]},
    },
    "required": ["unit", "is_new", "any"],
    "additionalProperties": False,
    "$defs": {"Unit": {"type": "string", "enum": ["C", "日本"]}},
}
TEXT = json.dumps({**SCHEMA, **SEPARATORS})
KINDS = {"f": {one.name: one.kind for one in parse_parameters(TEXT)}}


def tagged(**values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


CALLS: list[tuple[str, str, list[str]]] = [
    (
        "qwen3_coder",
        "So:\n" + tagged(text='a "b"\n</param\\', note="null", many="[1, 2]", is_new="True"),
        ['{"text": "a \\"b\\"\\n</param\\\\", "note": null, "many": [1, 2], "is_new": true}'],
    ),
    (
        "qwen3_coder",
        tagged(text="123", note="nullable", any="7") + "\n" + tagged(),
        ['{"text": "123", "note": "nullable", "any": 7}', "{}"],
    ),
    ("qwen3_coder", tagged(unit="C", other="12", odd="x y"), [
        '{"unit": "C", "other": 12, "odd": "x y"}'
    ]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=text>Paris</parameter></function>\n</tool_call>",
        ['{"text": "Paris"}'],
    ),
    (
        "llama_pythonic",
        """[f(city="X", n=-1.5, ok=True, no=None), f(), """
        """f(a='it\\'s "\\x41"', b=[1, {"c": False}])]""",
        [
            '{"city": "X", "n": -1.5, "ok": true, "no": null}',
            "{}",
            '{"a": "it\'s \\"A\\"", "b": [1, {"c": false}]}',
        ],
    ),
    ("llama_pythonic", '<|python_start|>[f(a="日,)]", b = .5 )]<|python_end|>', [
        '{"a": "日,)]", "b": 0.5}'
    ]),
    (
        "harmony",
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "}"}',
        ['{"a": "}"}'],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "arguments"), CALLS)
def test_every_split_of_a_text_gives_the_same_calls(
    name: str, text: str, arguments: list[str]
) -> None:
    splits = [[text[:at], text[at:]] for at in range(len(text) + 1)] + [list(text)]
    for parts in splits:
        parser = CallParser(FORMATS[name], kinds=KINDS)
        pushed = [parser.push(part) for part in parts]
        deltas = [delta for _, some in pushed for delta in some]
        content = "".join(content for content, _ in pushed) + parser.finish()
        assert content == ("So:\n" if text.startswith("So") else ""), parts
        calls = merge_deltas(deltas)
        assert [(call.name, call.arguments) for call in calls] == [("f", one) for one in arguments]
        assert all(json.loads(call.arguments) is not None for call in calls)
        assert parser.has_complete_calls


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("qwen3_coder", "<tool_call>\n<function=>", "<tool_call>\n<function=>", []),
        ("qwen3_coder", "<tool_call>\n<function=f g>", "<tool_call>\n<function=f g>", []),
        ("qwen3_coder", '<tool_call>{"name": 1}', None, []),
        ("qwen3_coder", "<tool_call>\n<function=f>\nHello", "Hello", [("f", "")]),
        ("llama_pythonic", "[1] says no", "[1] says no", []),
        ("llama_pythonic", "[f(1, 2)]", "1, 2)]", [("f", "")]),
        ("llama_pythonic", '[f(a=1, b="x" "y")]', '"y")]', [("f", '{"a": 1, "b": "x"')]),
        ("llama_pythonic", "[f(a=x)]", "x)]", [("f", '{"a": ')]),
        ("harmony", "<|channel|>commentary to=functions.f json", None, []),
    ],
)
def test_what_is_no_call_is_text_and_a_mistake_ends_the_call(
    name: str, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    for parts in ([text], list(text)):
        parser = CallParser(FORMATS[name], kinds=KINDS)
        pushed = [parser.push(part) for part in parts]
        shown = "".join(content for content, _ in pushed) + parser.finish()
        deltas = merge_deltas([delta for _, some in pushed for delta in some])
        assert shown == (text if content is None else content)
        assert [(delta.name, delta.arguments) for delta in deltas] == calls
        assert not parser.has_complete_calls


@pytest.mark.parametrize("name", ["qwen3_coder", "llama_pythonic"])
def test_texts_of_the_grammar_validate_against_the_schema(name: str) -> None:
    grammar = CallGrammar(call_format(name), [("f", TEXT)], parallel=False).calls_only()
    seen = set[str]()
    for seed in range(15):
        parser = CallParser(FORMATS[name], kinds=KINDS)
        _, deltas = parser.push(draw_text(name, grammar, random.Random(seed)))
        (call,) = merge_deltas(deltas)
        if not parser.has_complete_calls:
            continue  # a text that was cut: strings drawn at random end seldom
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, SCHEMA)
        seen |= {*arguments}
    assert {"unit", "is_new", "any"} < seen


def test_the_grammar_takes_raw_texts_of_the_right_kind_only() -> None:
    grammar = CallGrammar(call_format("qwen3_coder"), [("f", TEXT)], parallel=False).calls_only()
    good = {"unit": "C", "is_new": "True", "any": "null"}
    for more, is_admitted in (
        ({}, True),
        ({"unit": "K"}, False),
        ({"is_new": "maybe"}, False),
        ({"any": '"7"'}, False),
    ):
        assert admits("qwen3_coder", grammar, tagged(**good | more)) == is_admitted, more
    for lead, is_admitted in (
        ({"text": "a <b>\n</parameter"}, True),
        ({"note": "null"}, True),
        ({"short": "abc"}, False),  # after unit, as the schema has it
    ):
        assert admits("qwen3_coder", grammar, tagged(**lead, **good)) == is_admitted, lead
    for short, is_admitted in (("ab", True), ("a", False), ("abcd", False)):
        text = tagged(unit="C", short=short, is_new="true", any="1")
        assert admits("qwen3_coder", grammar, text) == is_admitted, short


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        ({"properties": {"a b": {}}}, "a b"),
        ({"anyOf": [{}]}, "anyOf"),
        ({"properties": {"a": {"$ref": "#"}}}, "ref"),
        ({"properties": {"a": False}}, "no value"),
    ],
)
def test_a_schema_that_cannot_be_split_is_refused(schema: dict[str, Any], match: str) -> None:
    with pytest.raises(BadValue, match=match):
        parse_parameters(json.dumps({"type": "object", **schema}))
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with serving(FakeService(), tokenizer=family("qwen3_coder"), vocab_size=4200) as server:
        reply = server.ask("/v1/chat/completions", {"messages": CHAT, "tools": [tool]})
        assert (reply.status, reply.error["param"]) == (400, "tools[0].function.parameters")


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
HARMONY_CALL = "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_gpt_oss_reasons_and_then_calls_or_answers(choice: str) -> None:
    tokenizer = family("harmony")
    service = FakeService(ANALYSIS + HARMONY_CALL, tokenizer)
    body = {"messages": CHAT, "tools": [WEATHER, TIME], "tool_choice": choice}
    with serving(service, tokenizer=tokenizer, max_context=2048, vocab_size=4200) as server:
        (answer,) = server.ask("/v1/chat/completions", body).json["choices"]
    message, (call,) = answer["message"], answer["message"]["tool_calls"]
    assert (answer["finish_reason"], message["content"]) == ("tool_calls", None)
    assert (message["reasoning_content"], call["function"]["name"]) == ("Hm.", "get_time")
    grammar = service.requests[0].grammar
    assert grammar is not None
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar.text)) == ""
    final = "<|channel|>final<|message|>Hello."
    for lead in ("", ANALYSIS):
        assert admits("harmony", grammar.text, lead + HARMONY_CALL)
        assert admits("harmony", grammar.text, lead + final) == (choice == "auto")
        assert not admits("harmony", grammar.text, f"{lead}<|channel|>final<|message|>{final}")


def test_without_tools_the_final_channel_is_opened_once() -> None:
    model = ModelReasoning.from_template(family("harmony").tool_template, family("harmony"))
    assert model is not None
    reasoning = PromptReasoning(model, PromptState.OPTIONAL)
    text = reasoning_grammar(reasoning, Grammar("lark", 'start: "yes"'), None)
    assert text is not None
    assert admits("harmony", text, "<|channel|>final<|message|>yes")


def test_a_malformed_call_is_answered_as_text() -> None:
    tokenizer = family("llama_pythonic")
    service = FakeService("[get time] is no call", tokenizer)
    with serving(service, tokenizer=tokenizer, max_context=2048, vocab_size=4200) as server:
        body = {"messages": CHAT, "tools": [TIME]}
        (answer,) = server.ask("/v1/chat/completions", body).json["choices"]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("stop", service.output)


def test_values_have_the_types_of_the_request_s_tool() -> None:
    tokenizer = family("qwen3_coder")
    output = tagged(city="123", unit="C").replace("=f>", "=get_weather>")
    service = FakeService(output, tokenizer)
    with serving(service, tokenizer=tokenizer, max_context=2048, vocab_size=4200) as server:
        body = {"messages": CHAT, "tools": [WEATHER]}
        (answer,) = server.ask("/v1/chat/completions", body).json["choices"]
    (call,) = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "123", "unit": "C"}
