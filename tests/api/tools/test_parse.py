"""Streamed answers are parsed into the same content and calls however they are cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.api.tools.arguments import ArgumentStyle
from specserve.api.tools.formats import FORMATS, CallFormat
from specserve.api.tools.json_end import JsonEndFinder
from specserve.api.tools.parse import (
    CallDelta,
    CallParser,
    merge_deltas,
    new_call_id,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(alphabet='a"\\{}[]</tool_call>é\n', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(alphabet='ab"\\}', max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
JSON_FORMATS = [name for name, form in FORMATS.items() if form.arguments is ArgumentStyle.JSON]
OBJECTS = st.dictionaries(st.text(alphabet='ab"\\}', max_size=3), JSON, max_size=3)
CUTS = st.lists(st.integers(0, 10_000), max_size=8)


def read(
    form: CallFormat, text: str, cuts: list[int]
) -> tuple[list[str], list[CallDelta], CallParser]:
    parser = CallParser(form)
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    contents: list[str] = []
    deltas: list[CallDelta] = []
    for begin, end in pairwise(borders):
        content, calls = parser.push(text[begin:end])
        assert len({call.index for call in calls}) == len(calls), (
            "at most one delta of a call at once"
        )
        contents.append(content)
        deltas += calls
    return [*contents, parser.finish()], deltas, parser


@pytest.mark.parametrize("name", JSON_FORMATS)
@given(
    before=st.sampled_from(["", "Let me see.\n", "a < b, <tool <tool_cal [TOOL", "日本 {"]),
    calls=st.lists(
        st.tuples(st.sampled_from(["f", "get_weather", "a-b"]), OBJECTS), min_size=1, max_size=3
    ),
    cuts=CUTS,
)
@settings(deadline=None, max_examples=150)
def test_calls_come_out_as_they_were_written_however_they_are_cut(
    name: str, before: str, calls: list[tuple[str, dict[str, object]]], cuts: list[int]
) -> None:
    form = FORMATS[name]
    before = before if form.trigger else ""
    calls = calls if form.next_prefix is not None else calls[:1]
    written = [(function, json.dumps(arguments)) for function, arguments in calls]
    contents, deltas, parser = read(form, before + form.render(written), cuts)
    assert "".join(contents) == before
    assert [(call.name, call.arguments) for call in merge_deltas(deltas)] == written
    assert [call.index for call in merge_deltas(deltas)] == list(range(len(calls)))
    assert parser.has_complete_calls
    named = [delta for delta in deltas if delta.name is not None]
    assert len({delta.id for delta in named}) == len(named) == len(calls), (
        "each has an id and a name once, with its first delta"
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text", ["", "Hello.", "<tool", "a [TOOL_CALLS", '"name": "x', "<|python", "<<tool_calls"]
)
@given(cuts=CUTS)
@settings(deadline=None, max_examples=30)
def test_a_text_without_calls_is_shown_to_its_last_character(
    name: str, text: str, cuts: list[int]
) -> None:
    contents, deltas, parser = read(FORMATS[name], text, cuts)
    assert ("".join(contents), deltas, parser.has_complete_calls) == (text, [], False)


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_nothing_of_an_opening_is_ever_shown_and_arguments_come_before_they_end(name: str) -> None:
    form = FORMATS[name]
    text = ("so: " if form.trigger else "") + form.render([("f", '{"a": [1, {"b": "}"}]}')])
    parser, shown, arguments = CallParser(form), "", []
    for char in text:
        content, calls = parser.push(char)
        shown += content
        arguments += [call.arguments for call in calls]
    assert shown == ("so: " if form.trigger else "")
    assert arguments == ["", *'{"a": [1, {"b": "}"}]}']


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_an_answer_that_was_cut_in_a_call_shows_what_there_is_of_it(name: str) -> None:
    form = FORMATS[name]
    whole = form.render([("f", '{"a": "b"}')])
    for end in range(1, len(whole)):
        contents, deltas, parser = read(form, whole[:end], [])
        content = "".join(contents)
        assert not content or whole[:end] == content != form.prefix, (
            "content is at most the beginning of a trigger"
        )
        assert (
            not content
            or not whole.startswith(form.trigger or "{")
            or len(content) < len(form.trigger)
        )
        assert (
            "".join(delta.arguments for delta in deltas)
            == '{"a": "b"}'[: max(0, end - len(form.prefix + "f" + form.infix))]
        )
        assert parser.has_complete_calls == (
            end >= len(form.prefix + "f" + form.infix + '{"a": "b"}')
        )


def test_a_special_prelude_belongs_to_the_call() -> None:
    contents, deltas, _ = read(
        FORMATS["llama"], '<|python_tag|>{"name": "f", "parameters": {}}', [3, 20]
    )
    assert ("".join(contents), [call.name for call in merge_deltas(deltas)]) == ("", ["f"])


def test_calls_that_stand_behind_text_are_text_where_the_format_has_no_trigger() -> None:
    text = 'It would be {"name": "f", "parameters": {}}'
    contents, deltas, parser = read(FORMATS["llama"], text, [5, 14])
    assert ("".join(contents), deltas, parser.has_complete_calls) == (text, [], False)


def test_the_end_of_an_object_is_found_behind_escapes_that_are_cut() -> None:
    end = JsonEndFinder()
    assert end.find('{"a\\') is None
    assert end.find('"}": {') is None
    assert end.find("}} rest") == 2


def test_ids_are_those_of_openai_and_no_two_are_equal() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(one.startswith("call_") and one[5:].isalnum() for one in ids)
