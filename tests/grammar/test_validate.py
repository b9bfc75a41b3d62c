"""Invalid grammars are refused early, by a message that names what is wrong and where."""

from __future__ import annotations

import contextlib
import json
import time

import pytest

from specserve.errors import BadValue
from specserve.grammar.validate import MAX_BYTES, validate_grammar
from specserve.types import Grammar

VALID = [
    Grammar(
        "json_schema",
        '{"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"enum": [1, null, "x"]}},'
        ' "additionalProperties": false}',
    ),
    Grammar("json_schema", "true"),
    Grammar("regex", "[a-z]+|é{2,5}"),
    Grammar("lark", 'start: "a" | "(" start ")"'),
    Grammar("lark", 'start: "<tool>" %json {"type": "object"}'),
]


@pytest.mark.parametrize("grammar", VALID)
def test_valid_grammars_pass(grammar: Grammar) -> None:
    validate_grammar(grammar)


INVALID = [
    ("json_schema", '{"not": {"type": "string"}}', "not"),
    ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    ("json_schema", '{"if": {"type": "string"}, "then": {"minLength": 3}}', "if, then"),
    ("json_schema", '{"type": "string", "format": "verse"}', "format: verse"),
    ("json_schema", '{"type": "strin"}', "strin"),
    ("json_schema", '{"type": "number", "minimum": 3, "maximum": 1}', r"minimum \(3\)"),
    ("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 0}]}', "oneOf"),
    ("json_schema", '{"$ref": "#/$defs/q"}', r"/\$defs/q"),
    ("json_schema", '{"$ref": "http://127.0.0.1/q"}', r"127\.0\.0\.1"),
    ("json_schema", '{"$ref": "#"}', "no text"),
    ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "pattern: look-around"),
    ("json_schema", "[1, 2", "no JSON"),
    ("json_schema", "3", "object"),
    ("json_schema", "false", "object"),
    ("json_schema", '{"x-guidance": {"whitespace_flexible": 3}}', "JSON schema cannot be followed"),
    ("json_schema", "[" * 5000, "no JSON"),
    ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, "no JSON|recursion"),
    ("regex", "a(b", "character 2: unclosed group"),
    ("regex", "(?<=a)b", "character 1: look-around"),
    ("lark", 'start: "a"\n)', "line 2, column 1"),
    ("lark", 'start: "a" b', 'line 1, column 8: unknown name: "b"'),
    ("lark", "", "Empty"),
    ("lark", 'start: %json {"type": "objekt"}', "objekt"),
    ("yaml", "a: b", "json_schema, regex, lark"),
    ("regex", "é" * (MAX_BYTES["regex"] // 2 + 1), f"{MAX_BYTES['regex'] + 2} bytes"),
]


@pytest.mark.parametrize(("kind", "text", "named"), INVALID)
def test_invalid_grammars_are_refused_naming_the_fault(kind: str, text: str, named: str) -> None:
    with pytest.raises(BadValue, match=named) as raised:
        validate_grammar(Grammar(kind, text))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(a|aa|aaa)*" * 500),
        Grammar("regex", "((a?){100}a{100}){20}"),
        Grammar("regex", "(.*a){900}"),
        Grammar("json_schema", json.dumps({"enum": [f"{'v' * 15}{i}" for i in range(2500)]})),
        Grammar(
            "json_schema",
            json.dumps(
                {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {f"k{i}": {"pattern": f"^[a-f]{{1,50}}{i}$"}},
                        }
                        for i in range(500)
                    ]
                }
            ),
        ),
        Grammar(
            "lark",
            "start: "
            + " ".join(f"a{i}?" for i in range(500))
            + "\n"
            + "\n".join(f'a{i}: "x" | a{(7 * i + 1) % 500}' for i in range(500)),
        ),
    ],
)
def test_validation_of_any_grammar_is_quick(grammar: Grammar) -> None:
    began = time.process_time()
    with contextlib.suppress(BadValue):
        validate_grammar(grammar)
    assert time.process_time() - began < 2


def test_a_grammar_that_is_dear_to_follow_is_refused() -> None:
    """51 kB of rules that each begin with the next one: a mask of it took 0.8 s."""
    rules = [f'a{i}: "x" | a{i + 1} | a{i + 1} a{i}' for i in range(1700)]
    bomb = "\n".join(["start: a0", *rules, 'a1700: "x"'])
    with pytest.raises(BadValue, match=r"the grammar is wrong: .*Too many items"):
        validate_grammar(Grammar("lark", bomb))


@pytest.mark.parametrize("pattern", ["a{100000}", "((a{1000}){1000}){1000}"])
def test_a_regular_expression_that_is_dear_to_start_is_refused(pattern: str) -> None:
    with pytest.raises(BadValue, match="too many expressions"):
        validate_grammar(Grammar("regex", pattern))


@pytest.mark.parametrize("kind", ["json_schema", "regex", "lark"])
def test_half_a_character_is_refused(kind: str) -> None:
    with pytest.raises(BadValue, match="half of a character at position 0"):
        validate_grammar(Grammar(kind, "\ud800"))
