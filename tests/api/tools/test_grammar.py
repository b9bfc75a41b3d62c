"""Grammars of answers that call admit calls whose arguments validate, and nothing else."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from specserve.api.detokenizer import IncrementalDetokenizer
from specserve.api.tools.grammar import CallGrammar
from specserve.api.tools.offer import SEPARATORS
from specserve.api.tools.parse import CallParser, merge_deltas
from tests.support.templates import FAMILIES, call_format, family

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "日本"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": WEATHER,
    "weather_now": {"type": "object", "properties": {}, "additionalProperties": False},
}
FUNCTIONS = [(name, json.dumps({**schema, **SEPARATORS})) for name, schema in SCHEMAS.items()]
END = 0  # the token that ends a text
WITH_TRIGGER = [name for name in FAMILIES if call_format(name).format.trigger]


@cache
def vocabulary(name: str) -> LLTokenizer:
    return LLTokenizer(family(name)._backend.to_str(), eos_token=END)


def grammar(name: str, *, parallel: bool = True) -> CallGrammar:
    return CallGrammar(call_format(name), FUNCTIONS, parallel=parallel)


def matcher(name: str, text: str) -> LLMatcher:
    made = LLMatcher(vocabulary(name), LLMatcher.grammar_from_lark(text))
    assert not made.is_error(), made.get_error()
    return made


def admits(name: str, grammar: str, text: str) -> bool:
    """Return True if the grammar admits the whole text, as the tokenizer encodes it."""
    made, ids = matcher(name, grammar), family(name).encode(text)
    return made.try_consume_tokens(list(ids)) == len(ids) and made.is_accepting()


def written(name: str, *calls: tuple[str, str]) -> str:
    return call_format(name).format.render(list(calls))


ONE, OTHER = ("weather", '{"city": "Paris", "days": 3}'), ("weather_now", "{}")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_required_call_is_one_of_the_functions_with_its_own_arguments(name: str) -> None:
    text = grammar(name).calls_only()
    assert admits(name, text, written(name, ONE))
    assert admits(name, text, written(name, OTHER))
    for wrong in (
        "",
        "Hello.",
        written(name, ("other", "{}")),
        written(name, (OTHER[0], ONE[1])),
        written(name, ("weather", "{}")),
        written(name, ONE)[:-1],
    ):
        assert not admits(name, text, wrong)


@pytest.mark.parametrize("name", FAMILIES)
def test_several_calls_get_through_only_where_they_may(name: str) -> None:
    both = written(name, ONE, OTHER)
    may = call_format(name).format.next_prefix is not None
    assert admits(name, grammar(name).calls_only(), both) == may
    assert not admits(name, grammar(name, parallel=False).calls_only(), both)


@pytest.mark.parametrize("name", FAMILIES)
def test_where_no_call_is_needed_any_text_will_do_until_a_call_begins(name: str) -> None:
    text, form = grammar(name).calls_or_text(), call_format(name).format
    for answer in ("", "Hello.\n", "a < b {} ["):
        assert admits(name, text, form.answer_opening + answer), answer
    assert admits(name, text, written(name, ONE))
    has_lead = form.trigger and not form.is_channel
    if not form.is_channel:
        assert admits(name, text, "Let me see.\n" + written(name, ONE))
    begun = "Well. " + form.prefix if has_lead else form.prefix
    assert not admits(name, text, begun + "other")
    assert not admits(name, text, begun + "!")
    assert not admits(name, text, begun)


def test_a_prelude_may_stand_before_a_call_and_nowhere_else() -> None:
    text = grammar("llama").calls_or_text()
    assert admits("llama", text, "<|python_tag|>" + written("llama", ONE))
    assert not admits("llama", text, "<|python_tag|>Hello")
    assert not admits("llama", text, "Hello<|python_tag|>")


@pytest.mark.parametrize("name", WITH_TRIGGER)
def test_json_may_be_the_alternative_to_a_call(name: str) -> None:
    text = grammar(name).calls_or_json(
        '{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], '
        '"additionalProperties": false}'
    )
    assert admits(name, text, call_format(name).format.answer_opening + '{"a": null}')
    assert admits(name, text, written(name, OTHER))
    assert not admits(name, text, "Hello")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_text_of_the_grammar_parses_as_calls_that_validate(name: str) -> None:
    called = set()
    for seed in range(12):
        text = draw_text(name, grammar(name).calls_only(), random.Random(seed))
        parser = CallParser(call_format(name).format)
        content, pieces = parser.push(text)
        calls = merge_deltas(pieces)
        assert (content, parser.finish(), parser.has_complete_calls) == ("", "", True), text
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name or ""])
        form = call_format(name).format
        calls_text = text.removeprefix(form.prelude)
        if form.postlude:
            calls_text = calls_text.removesuffix(form.postlude)
        assert written(name, *((call.name or "", call.arguments) for call in calls)) == calls_text
        called.add(tuple(call.name for call in calls))
    assert len(called) > 1, "all drawn texts call the same"


def draw_text(name: str, grammar: str, rng: random.Random) -> str:
    """Return the visible text of tokens drawn evenly from those that are allowed."""
    made, mask = matcher(name, grammar), allocate_token_bitmask(1, vocabulary(name).vocab_size)
    ids: list[int] = []
    while len(ids) < 3000:
        fill_next_token_bitmask(made, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = END if END in allowed and rng.random() < 0.5 else rng.choice(allowed.tolist())
        if token == END:
            break
        assert made.consume_token(token)
        ids.append(token)
    detokenizer = IncrementalDetokenizer(
        family(name), visible_ids=call_format(name).special_ids.values()
    )
    return detokenizer.push(ids) + detokenizer.finish()
