"""Schemas in the library's words say exactly what they said before, or are refused."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from specserve.errors import BadValue
from specserve.grammar.exclusion import Exclusion
from specserve.grammar.json_schema import MAX_MEMBERS
from specserve.grammar.request import parse_guided, schema_grammar
from specserve.grammar.validate import library_grammar, validate_grammar
from specserve.types import Grammar

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
VALUES: list[Any] = [
    *(None, True, 0, 1, 1.0, 3, 4, 5.5, "", "a", "b", "abc", "abcde"),
    *([], ["a"], ["b"], ["a", "b", "c"], {}, {"A": "x"}, {"B": "x"}, {"A": "x", "B": "y"}),
    *({"k": "a"}, {"k": "b"}, {"k": "b", "x": 1}, {"v": "s"}, {"v": 3}, {"k": None}),
]


def record(properties: Mapping[str, object], **more: object) -> Schema:
    return {"type": "object", "properties": dict(properties), **more}


def kind(name: str) -> Schema:
    return record({"k": {"const": name}}, required=["k"])


def closed(name: str) -> Schema:
    return record({name: STRING}, required=[name], additionalProperties=False)


DEFINITIONS = {"$defs": {"a": kind("a"), "b": {"allOf": [{"$ref": "#/$defs/c"}]}, "c": kind("b")}}
FOLLOWED: dict[str, Schema] = {
    "references": {**DEFINITIONS, "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
    "beside anyOf": {
        **DEFINITIONS,
        "anyOf": [{"type": "object"}, {"type": "null"}],
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/c"}],
    },
    "types": {"oneOf": [STRING, {"type": ["null", "array"]}]},
    "values": {"oneOf": [{"const": "a", "title": "A"}, {"enum": ["b", None]}]},
    "forbidden members": {"oneOf": [closed("A"), closed("B")]},
    "member types": {"oneOf": [record({"v": {"type": "integer"}}, required=["v"]), closed("v")]},
    "lengths": {"oneOf": [{**STRING, "maxLength": 1}, {**STRING, "minLength": 4}]},
    "ranges": {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "number", "minimum": 4}]},
    "numbers of items": {
        "oneOf": [{"type": "array", "maxItems": 1}, {"minItems": 2} | {"type": "array"}]
    },
    "items": {
        "oneOf": [
            {"type": "array", "prefixItems": [{"const": name}], "minItems": 1} for name in "ab"
        ]
    },
    "branches of branches": {
        "oneOf": [{"anyOf": [{"oneOf": [STRING]}, {"type": "null"}]}, kind("a")]
    },
    "one in a member": record({"k": {"oneOf": [{"const": "a"}, {"type": "null"}]}}, required=["k"]),
    "false": {"oneOf": [False, STRING]},
}
REFUSED: dict[str, Schema] = {
    "1 is 1.0": {"oneOf": [{"const": 1}, {"enum": [1.0, 3]}]},
    "an optional member": {"oneOf": [record({"k": {"const": name}}) for name in "ab"]},
    "no type": {"oneOf": [{"required": ["A"]}, {"required": ["B"]}]},
    "any object": {
        "oneOf": [{"properties": closed(name)["properties"], "required": [name]} for name in "AB"]
    },
    "patterns": {"oneOf": [{**STRING, "pattern": f"^{first}"} for first in "ab"]},
    "integers are numbers": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "a member by its pattern": {
        "oneOf": [closed("A") | {"patternProperties": {"B": STRING}}, record({}, required=["B"])]
    },
    "a reference into it": {
        "oneOf": [{**STRING, "maxLength": 1}, {**STRING, "minLength": 4}],
        "$defs": {"x": {"$ref": "#/oneOf/0"}},
    },
    "itself": {"$defs": {"a": record({"n": {"$ref": "#/$defs/a"}}, required=["n"])}}
    | {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]},
}


def accepts(grammar: Grammar, value: object) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), library_grammar(grammar), log_level=0)
    return matcher.try_consume_tokens([*json.dumps(value).encode()]) == len(
        json.dumps(value)
    ) and bool(matcher.is_accepting())


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_one_of_whose_branches_exclude_one_another_is_followed(name: str) -> None:
    schema = FOLLOWED[name]
    grammar = schema_grammar("guided", schema)
    validate_grammar(grammar)
    values = [value for value in VALUES if repr(value) != "1.0"]  # an integer is written 1
    valid = [Draft202012Validator(schema).is_valid(value) for value in values]
    assert any(valid)
    assert [accepts(grammar, value) for value in values] == valid


@pytest.mark.parametrize("name", REFUSED)
def test_a_one_of_whose_branches_may_overlap_is_refused(name: str) -> None:
    with pytest.raises(BadValue, match=r"oneOf|circular"):
        validate_grammar(schema_grammar("guided", REFUSED[name]))


SCHEMAS: st.SearchStrategy[Any] = st.deferred(
    lambda: st.one_of(
        st.sampled_from([True, False, *FOLLOWED.values(), *REFUSED.values()]),
        st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(
                    ["null", "number", "integer", "string", "array", "object", ["object", "null"]]
                ),
                "const": st.sampled_from(VALUES),
                "enum": st.lists(st.sampled_from(VALUES), max_size=3),
                "minimum": st.integers(0, 5),
                "maximum": st.integers(0, 5),
                "minLength": st.integers(0, 4),
                "maxLength": st.integers(0, 4),
                "minItems": st.integers(0, 3),
                "maxItems": st.integers(0, 3),
                "prefixItems": st.lists(SCHEMAS, min_size=1, max_size=2),
                "required": st.lists(st.sampled_from("ABkv"), max_size=2, unique=True),
                "properties": st.dictionaries(st.sampled_from("ABkv"), SCHEMAS, max_size=2),
                "additionalProperties": st.booleans(),
                "allOf": st.lists(SCHEMAS, min_size=1, max_size=2),
                "anyOf": st.lists(SCHEMAS, min_size=1, max_size=2),
                "oneOf": st.lists(SCHEMAS, min_size=1, max_size=2),
            },
        ),
    )
)


@settings(max_examples=400, deadline=None)
@given(one=SCHEMAS, other=SCHEMAS)
def test_no_value_satisfies_two_schemas_that_exclude_one_another(one: Any, other: Any) -> None:
    both = DEFINITIONS | {"allOf": [one, other]}
    if Exclusion(both).excludes(one, other):
        assert not any(map(Draft202012Validator(both).is_valid, VALUES))


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("http://ex.org/rosé?q=日本#x", True),
        ("urn:isbn:0451450523", True),
        ("mailto:Jürgen@münchen.example", True),
        ("ftp://u:p@[2001:db8::7]:21/a%20b", True),
        ("http://[::ffff:10.0.0.1]/", True),
        ("a:", True),
        ("http://[1::2::3]/", False),
        ("http://a b/", False),
        ("rosé/a", False),
        ("1http://a/", False),
        ("http://a/%zz", False),
        ("http://a/\ue000", False),
        ("http://a/?\ue000", True),
        ("", False),
    ],
)
def test_an_iri_is_followed_by_the_grammar_of_its_standard(text: str, valid: bool) -> None:
    grammar = schema_grammar("guided", {"type": "string", "format": "iri"})
    validate_grammar(grammar)
    matcher = LLMatcher(LLTokenizer("byte"), library_grammar(grammar), log_level=0)
    written = json.dumps(text, ensure_ascii=False).encode()
    whole = matcher.try_consume_tokens([*written]) == len(written) and matcher.is_accepting()
    assert whole == valid


def test_a_format_that_json_schema_does_not_know_binds_nothing() -> None:
    any_path = record({"path": STRING | {"format": "path"}, "format": STRING | {"maxLength": 3}})
    validate_grammar(grammar := schema_grammar("guided", any_path))
    assert accepts(grammar, {"path": "a b", "format": "url"})
    assert not accepts(grammar, {"path": "a b", "format": "long"}), "a member of that name stays"
    with pytest.raises(BadValue, match="Unknown format: regex"):
        validate_grammar(schema_grammar("guided", STRING | {"format": "regex"}))


def test_an_iri_with_a_pattern_obeys_both() -> None:
    grammar = schema_grammar("guided", {"type": "string", "format": "iri", "pattern": "^urn:"})
    assert accepts(grammar, "urn:a")
    assert not accepts(grammar, "url:a")
    assert not accepts(grammar, "urn:a b")


@pytest.mark.parametrize(
    ("names", "is_taken"),
    [
        ({"type": "string"}, True),
        ({"type": "string", "title": "Name"}, True),
        (True, True),
        ({"type": "string", "maxLength": 1}, False),
        ({"type": "integer"}, False),
    ],
)
def test_property_names_are_taken_where_any_name_obeys_them(names: object, is_taken: bool) -> None:
    grammar = schema_grammar(
        "guided", {"type": "object", "propertyNames": names, "additionalProperties": STRING}
    )
    if is_taken:
        validate_grammar(grammar)
        assert accepts(grammar, {"any": "a"})
        assert not accepts(grammar, {"any": 1})
    else:
        with pytest.raises(BadValue, match="propertyNames"):
            validate_grammar(grammar)


def test_descriptions_do_not_count_and_members_of_their_names_stay() -> None:
    notes = {"description": "x" * 300_000, "title": "y", "examples": [{"oneOf": []}], "default": 3}
    schema = record({"description": STRING | notes, "title": {"const": {"title": 1}}}, **notes)
    grammar = schema_grammar("guided", schema | {"required": ["title", "description"]})
    assert json.loads(grammar.text) == record(
        {"description": STRING, "title": {"const": {"title": 1}}},
        required=["title", "description"],
    )


def test_schemas_of_kubernetes_size_are_followed_and_too_many_members_are_refused() -> None:
    def container(number: int) -> Schema:
        later = {"items": {"$ref": f"#/$defs/T{number + 1}"}} if number < 199 else {}
        members = {f"member{number}{i}": STRING | {"description": "of it " * 40} for i in range(5)}
        return record({**members, "more": {"type": "array", **later}}, required=["more"])

    schema = {"$defs": {f"T{i}": container(i) for i in range(200)}, "$ref": "#/$defs/T0"}
    assert len(json.dumps(schema)) > 250_000
    grammar = parse_guided({"json": schema})
    assert grammar is not None
    validate_grammar(grammar)
    assert accepts(grammar, {"more": [{"more": []}]})
    many = record({f"m{i}": STRING for i in range(MAX_MEMBERS + 1)})
    for asked in (
        {"json": many},
        {
            "structural_tag": {
                "type": "structural_tag",
                "format": {"type": "json_schema", "json_schema": many},
            }
        },
    ):
        with pytest.raises(BadValue, match="2001 properties of one object; 2000 are") as refusal:
            parse_guided(asked)
        assert refusal.value.param == "guided"


def tagged(number: int) -> Schema:
    return {"allOf": [{"$ref": "#/$defs/big"}, kind(f"k{number}")]}


BIG: dict[str, Schema] = {
    "required members": {"required": [f"r{i}" for i in range(1500)]},
    "parts": {"allOf": [{} for _ in range(1000)]},
    "values": {"enum": [f"v{i}" for i in range(1500)]},
    "branches": {"anyOf": [{"type": "object", "maxItems": i} for i in range(500)]},
}


@pytest.mark.parametrize("name", BIG)
def test_schemas_that_are_expensive_to_compare_are_left_alone_in_time(name: str) -> None:
    """Compare 140 branches that share something big: 23 s of a processor for a schema of 28 kB."""
    schema = {"$defs": {"big": BIG[name]}, "oneOf": [tagged(i) for i in range(140)]}
    began = time.process_time()
    schema_grammar("guided", schema)
    assert time.process_time() - began < 2


def test_a_hundred_branches_are_compared_and_parts_with_a_base_are_left_alone() -> None:
    schema = {
        "$defs": {f"d{i}": kind(f"k{i}") for i in range(100)},
        "oneOf": [{"$ref": f"#/$defs/d{i}"} for i in range(100)],
    }
    validate_grammar(schema_grammar("guided", schema))
    based = schema_grammar("guided", {**schema, "properties": {"x": {"$id": "http://h/x"}}})
    assert "oneOf" in json.loads(based.text)
