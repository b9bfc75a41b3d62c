"""Parsing of response_format and guided to a grammar: each kind, and every limit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specserve.errors import BadValue
from specserve.grammar.request import (
    MAX_DEPTH,
    MAX_SCHEMA,
    MAX_SIZE,
    NO_FORCING,
    parse_guided,
    parse_response_format,
)
from specserve.grammar.validate import validate_grammar
from specserve.sampling_params import Sampling
from specserve.types import Grammar

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": [None, "é"]}}}
NAMED = {"name": "thing", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json_schema", '{"type": "object"}')),
        ({"type": "json_schema", "json_schema": NAMED}, Grammar("json_schema", json.dumps(SCHEMA))),
        (
            {"type": "json_schema", "json_schema": NAMED | {"strict": True, "description": "d"}},
            Grammar("json_schema", json.dumps(SCHEMA)),
        ),
    ],
)
def test_a_response_format_becomes_a_grammar_with_the_properties_in_their_order(
    given: dict[str, Any] | None, grammar: Grammar | None
) -> None:
    assert parse_response_format(given) == grammar
    assert Sampling(response_format=given).requests([1])[0].grammar == grammar


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        (None, None),
        ({"regex": "[a-c]+"}, Grammar("regex", "[a-c]+")),
        ({"grammar": 'start: "a"'}, Grammar("lark", 'start: "a"' + NO_FORCING)),
        ({"json": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA))),
        ({"json": json.dumps(SCHEMA)}, Grammar("json_schema", json.dumps(SCHEMA))),
        ({"choice": ["yes", 'n"o\n', "日"]}, Grammar("lark", 'start: "yes" | "n\\"o\\n" | "日"')),
    ],
)
def test_guided_becomes_a_grammar_that_can_be_followed(
    given: dict[str, Any] | None, grammar: Grammar | None
) -> None:
    assert parse_guided(given) == grammar
    sampling = Sampling(guided=given, n=2)
    assert [request.grammar for request in sampling.requests([1])] == [grammar] * 2
    sampling.check_grammar()


def deep(levels: int) -> object:
    value: object = {"type": "string"}
    for _ in range(levels):
        value = {"items": value}
    return value


def test_grammars_are_accepted_up_to_the_limits_and_no_further() -> None:
    deepest = parse_guided({"json": deep(MAX_DEPTH - 1)})
    assert deepest is not None
    validate_grammar(deepest)
    parse_guided({"regex": "a" * MAX_SIZE})
    for given in (
        {"json": deep(MAX_DEPTH)},
        {"json": deep(20_000)},
        {"regex": "a" * (MAX_SIZE + 1)},
        {"json": {"const": "x" * MAX_SCHEMA}},
    ):
        with pytest.raises(BadValue, match="guided") as refusal:
            parse_guided(given)
        assert (refusal.value.param, len(str(refusal.value)) < 200) == ("guided", True)


@pytest.mark.parametrize(
    "schema",
    [{"const": float("nan")}, {"const": object()}, {"enum": {1, 2}}, "text", ["list"], None, 5],
)
def test_a_schema_that_is_not_json_is_refused(schema: object) -> None:
    with pytest.raises(BadValue, match="response_format"):
        parse_response_format(
            {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        )


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        (Grammar("json_schema", '{"not": {}}'), "not"),
        (Grammar("json_schema", '{"if": {}}'), "if"),
        (Grammar("json_schema", '{"type": "strang"}'), "strang"),
        (Grammar("regex", "(a"), "unclosed"),
        (Grammar("lark", "foo: 1"), "1"),  # its line
    ],
)
def test_an_unsupported_keyword_is_named(grammar: Grammar, named: str) -> None:
    with pytest.raises(BadValue, match=named):
        validate_grammar(grammar)


@pytest.mark.parametrize(
    ("given", "param", "names"),
    [
        (
            {"guided": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "guided",
            ["guided", "response_format"],
        ),
        ({"guided": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", ["guided", "ignore_eos"]),
        (
            {"response_format": {"type": "json_object"}, "echo": True},
            "echo",
            ["response_format", "echo"],
        ),
        ({"guided": {"regex": "a", "json": {}}}, "guided", ["regex", "json"]),
    ],
)
def test_parameters_that_exclude_one_another_are_refused_naming_both(
    given: dict[str, Any], param: str, names: list[str]
) -> None:
    with pytest.raises(BadValue) as refusal:
        Sampling(**given)
    assert refusal.value.param == param
    assert all(name in str(refusal.value) for name in names)


def test_a_format_of_plain_text_excludes_nothing() -> None:
    assert Sampling(
        response_format={"type": "text"}, guided={"regex": "a"}, seed=1
    ).grammar == Grammar("regex", "a")
    Sampling(response_format={"type": "text"}, ignore_eos=True, echo=True)
