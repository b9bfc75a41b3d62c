"""Answers read as they stream: however they are cut, content is content and calls are calls."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.api.tools.formats import FORMATS, Format
from specserve.api.tools.parse import CallPiece, Calls, JsonEnd, fresh_id, joined

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
OBJECTS = st.dictionaries(st.text(alphabet='ab"\\}', max_size=3), JSON, max_size=3)
CUTS = st.lists(st.integers(0, 10_000), max_size=8)


def read(form: Format, text: str, cuts: list[int]) -> tuple[list[str], list[CallPiece], Calls]:
    reader = Calls(form)
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    contents, pieces = [], []
    for begin, end in pairwise(borders):
        content, calls = reader.push(text[begin:end])
        assert len({call.index for call in calls}) == len(calls), (
            "at most one piece of a call at once"
        )
        contents.append(content)
        pieces += calls
    return [*contents, reader.finish()], pieces, reader


@pytest.mark.parametrize("name", FORMATS)
@given(
    before=st.sampled_from(["", "Let me see.\n", "a < b, <tool <tool_cal [TOOL", "日本 {"]),
    calls=st.lists(
        st.tuples(st.sampled_from(["f", "get_weather", "a-b"]), OBJECTS), min_size=1, max_size=3
    ),
    cuts=CUTS,
)
@settings(deadline=None, max_examples=150)
def test_calls_come_out_as_they_were_written_however_they_are_cut(name, before, calls, cuts):
    form = FORMATS[name]
    before = before if form.trigger else ""
    calls = calls if form.next is not None else calls[:1]
    written = [(function, json.dumps(arguments)) for function, arguments in calls]
    contents, pieces, reader = read(form, before + form.written(written), cuts)
    assert "".join(contents) == before
    assert [(call.name, call.arguments) for call in joined(pieces)] == written
    assert [call.index for call in joined(pieces)] == list(range(len(calls)))
    assert reader.called
    named = [piece for piece in pieces if piece.name is not None]
    assert len({piece.id for piece in named}) == len(named) == len(calls), (
        "each has an id and a name once, with its first piece"
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text", ["", "Hello.", "<tool", "a [TOOL_CALLS", '"name": "x', "<|python", "<<tool_calls"]
)
@given(cuts=CUTS)
@settings(deadline=None, max_examples=30)
def test_a_text_without_calls_is_shown_to_its_last_character(name, text, cuts):
    contents, pieces, reader = read(FORMATS[name], text, cuts)
    assert ("".join(contents), pieces, reader.called) == (text, [], False)


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_of_an_opening_is_ever_shown_and_arguments_come_before_they_end(name):
    form = FORMATS[name]
    text = ("so: " if form.trigger else "") + form.written([("f", '{"a": [1, {"b": "}"}]}')])
    reader, shown, arguments = Calls(form), "", []
    for char in text:
        content, calls = reader.push(char)
        shown += content
        arguments += [call.arguments for call in calls]
    assert shown == ("so: " if form.trigger else "")
    assert arguments == ["", *'{"a": [1, {"b": "}"}]}']


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_was_cut_in_a_call_shows_what_there_is_of_it(name):
    form = FORMATS[name]
    whole = form.written([("f", '{"a": "b"}')])
    for end in range(1, len(whole)):
        contents, pieces, reader = read(form, whole[:end], [])
        content = "".join(contents)
        assert not content or whole[:end] == content != form.first, (
            "content is at most the beginning of a trigger"
        )
        assert (
            not content
            or not whole.startswith(form.trigger or "{")
            or len(content) < len(form.trigger)
        )
        assert (
            "".join(piece.arguments for piece in pieces)
            == '{"a": "b"}'[: max(0, end - len(form.first + "f" + form.middle))]
        )
        assert reader.called == (end >= len(form.first + "f" + form.middle + '{"a": "b"}'))


def test_a_special_prelude_belongs_to_the_call():
    contents, pieces, _ = read(
        FORMATS["llama"], '<|python_tag|>{"name": "f", "parameters": {}}', [3, 20]
    )
    assert ("".join(contents), [call.name for call in joined(pieces)]) == ("", ["f"])


def test_calls_that_stand_behind_text_are_text_where_the_format_has_no_trigger():
    text = 'It would be {"name": "f", "parameters": {}}'
    contents, pieces, reader = read(FORMATS["llama"], text, [5, 14])
    assert ("".join(contents), pieces, reader.called) == (text, [], False)


def test_the_end_of_an_object_is_found_behind_escapes_that_are_cut():
    end = JsonEnd()
    assert end.find('{"a\\') is None
    assert end.find('"}": {') is None
    assert end.find("}} rest") == 2


def test_ids_are_those_of_openai_and_no_two_are_equal():
    ids = {fresh_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(one.startswith("call_") and one[5:].isalnum() for one in ids)
