"""Structural tags constrain what stands in a tag and nothing else, in both forms of vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specserve.errors import BadValue
from specserve.grammar.request import parse_guided
from tests.support.grammar_texts import FORBIDDEN, PREFIX, WHOLE, how_far

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STRUCTURES = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
        {"begin": "<function=time>", "schema": {"type": "null"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY, DIGITS = {"type": "any_text"}, {"type": "regex", "pattern": "(/|[0-9])+.*"}
TAGS = [tag("<a>", const("1"), "</a>"), tag("<b>", const("2"), "")]
TRIGGERED: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": TAGS}
SEPARATED = {"type": "tags_with_separator", "separator": ", ", "tags": TAGS}
NULL = {"type": "json_schema", "json_schema": {"type": "null"}}
SEQUENCE = {
    "type": "sequence",
    "elements": [const("A"), {"type": "or", "elements": [const("B"), NULL]}, ANY],
}


@pytest.mark.parametrize(
    ("format_", "text", "outcome"),
    [
        (const("yes"), "yes", WHOLE),
        (tag("<a>", ANY, "</a>"), "<a>b\n</a>", WHOLE),
        (tag("<a>", ANY, "</a>"), "<a>b</a>c", FORBIDDEN),
        (tag("<a>", DIGITS, "</a>"), "<a>1/x</a>", WHOLE),
        (tag("<a>", DIGITS, "</a>"), "<a>x", FORBIDDEN),
        (tag("<a>", NULL, "</a>"), "<a>null</a>", WHOLE),
        (SEQUENCE, "AB", WHOLE),
        (SEQUENCE, "Anull, and more", WHOLE),
        (SEQUENCE, "AC", FORBIDDEN),
        (SEPARATED, "<a>1</a>, <b>2", WHOLE),
        (SEPARATED, "", WHOLE),
        (SEPARATED | {"at_least_one": True}, "", PREFIX),
        (SEPARATED | {"stop_after_first": True}, "<b>2,", FORBIDDEN),
        (TRIGGERED, "free < text", WHOLE),
        (TRIGGERED, "x<a>1</a>y<b>2z", WHOLE),
        (TRIGGERED, "x<a>2", FORBIDDEN),
        (TRIGGERED | {"at_least_one": True}, "free text", PREFIX),
        (TRIGGERED | {"at_least_one": True}, "x<b>2 text", WHOLE),
        (TRIGGERED | {"stop_after_first": True}, "x<b>2 ", FORBIDDEN),
        (TRIGGERED | {"stop_after_first": True}, "free text", WHOLE),
    ],
)
def test_a_format_derives_its_texts(format_: dict[str, Any], text: str, outcome: str) -> None:
    given = {"type": "structural_tag", "format": format_}
    assert how_far({"structural_tag": given}, text) == outcome
    assert how_far({"structural_tag": json.dumps(given)}, text) == outcome


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("no function", WHOLE),
        ('It is <function=weather>{"city": "x"}</function>, <function=time>null</function>', WHOLE),
        ("<function=tide>", FORBIDDEN),
        ("<function=weather>{}", FORBIDDEN),
        ("<function=weather>", PREFIX),
    ],
)
def test_the_older_form_is_the_same(text: str, outcome: str) -> None:
    assert how_far({"structural_tag": STRUCTURES}, text) == outcome


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "not JSON"),
        ([], "must be an object"),
        ({"type": "structural_tag"}, "structures is missing"),
        ({"type": "tag"}, "has the type structural_tag"),
        (STRUCTURES | {"trigger": ["<"]}, "not 'trigger'"),
        (STRUCTURES | {"triggers": ["<x"]}, "begins with no trigger"),
        (STRUCTURES | {"triggers": [""]}, "empty trigger"),
        (STRUCTURES | {"triggers": []}, "not an empty one"),
        ({"type": "structural_tag", "format": {"type": "grammar"}}, "knows the formats"),
        ({"type": "structural_tag", "format": const("a") | {"value": 1}}, "needs a text"),
        (
            {"type": "structural_tag", "format": {"type": "sequence", "elements": [ANY, NULL]}},
            "any_text where something follows",
        ),
        (
            {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": 1}},
            "needs a JSON schema",
        ),
        ({"type": "structural_tag", "format": json.loads('{"a":' * 80 + "1" + "}" * 80)}, "levels"),
    ],
)
def test_what_is_no_structural_tag_is_refused(given: object, words: str) -> None:
    with pytest.raises(BadValue, match=words) as error:
        parse_guided({"structural_tag": given})
    assert error.value.param == "guided"
