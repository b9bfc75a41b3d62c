"""Grammars begin after the reasoning, and a budget forces its end after a number of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from llguidance import LLTokenizer

from specserve.api.reasoning.grammar import reasoning_grammar
from specserve.errors import BadValue
from specserve.grammar.matcher import GrammarCompiler, GrammarMatcher
from specserve.grammar.request import NO_FORCING
from specserve.types import Grammar
from tests.support.reasoners import prompt_reasoning, reasoner

END = 0
A_NULL = Grammar(
    "json_schema",
    '{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], '
    '"additionalProperties": false}',
)
YES = Grammar("lark", 'start: "yes" x\nx: /!+/')
SLASH = Grammar("regex", "a/b[/]")


def matcher(name: str, answer: Grammar | None, budget: int | None = None) -> GrammarMatcher:
    text = reasoning_grammar(prompt_reasoning(name), answer, budget)
    assert text is not None
    compiler = GrammarCompiler(
        lambda: LLTokenizer(reasoner(name)._backend.to_str(), eos_token=END),
        end_ids=frozenset({END}),
    )
    made = compiler.start(Grammar("lark", text + NO_FORCING))
    assert made.error is None
    return made


def allowed(made: GrammarMatcher) -> set[int]:
    bits = np.unpackbits(made.bits().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def admits(name: str, answer: Grammar | None, text: str, budget: int | None = None) -> bool:
    made, ids = matcher(name, answer, budget), reasoner(name).encode(text)
    made.write(0, ids)
    return not made.is_terminated and END in allowed(made)


LEADS = {
    "optional": ("<think>\nHm {[ yes\n</think>\n\n", ""),
    "untokenized": ("<think>\nHm {[ yes\n</think>\n\n", ""),
    "open": ("Hm {[ yes\n</think>\n\n", "</think>"),
    "closed": ("", "\n\n"),
    "harmony": (
        "<|channel|>analysis<|message|>Hm {[ yes<|end|><|start|>assistant"
        "<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
    ),
}


@pytest.mark.parametrize("name", LEADS)
def test_a_grammar_constrains_the_answer_and_not_the_reasoning(name: str) -> None:
    for lead in LEADS[name]:
        assert admits(name, A_NULL, lead + '{"a": null}')
        assert admits(name, YES, lead + "yes!!")
        assert admits(name, SLASH, lead + "a/b/")
        for wrong in ("", "Hm.", '{"a": 1}', "yes"):
            assert not admits(name, A_NULL, lead + wrong)
            assert not admits(name, YES, lead + wrong)
    if name in ("open", "harmony"):
        assert not admits(name, A_NULL, '{"a": null}'), "without what must come before it"


@pytest.mark.parametrize("name", ["optional", "open", "harmony"])
def test_the_end_of_the_reasoning_is_forced_behind_its_budget_and_after_a_rollback(
    name: str,
) -> None:
    model = prompt_reasoning(name).model
    end = model.marker_ids["<|end|>" if name == "harmony" else "</think>"]
    opening = () if name == "open" else reasoner(name).encode(model.format.opening)
    words = reasoner(name).encode("import os import sys and more of it")[:6]
    made = matcher(name, None, budget=5)
    made.write(0, (*opening, *words))
    assert made.is_terminated, "six tokens are one too many"
    for rolled_back in (5, 3, 5):
        made.write(len(opening), words[:rolled_back])
        assert not made.is_terminated
        tokens = allowed(made)
        assert end in tokens
        assert END not in tokens
        assert not tokens & {*model.special_ids} - {end}
        assert (len(tokens) == 1) == (rolled_back == 5)
    made.write(len(opening) + 5, (end,))
    assert not made.is_terminated


def test_without_a_budget_nothing_but_the_end_ends_the_reasoning() -> None:
    made, words = matcher("open", A_NULL), reasoner("open").encode("so and so on " * 40)
    made.write(0, words)
    assert len(allowed(made)) > 4000
    assert END not in allowed(made)


def test_a_budget_of_nothing_leaves_no_reasoning() -> None:
    assert admits("open", None, "</think>\n\nYes.", budget=0)
    assert not admits("open", None, "a</think>\n\nYes.", budget=0)
    assert admits("optional", None, "Yes.", budget=0)
    assert not admits("optional", None, "<think>a</think>Yes.", budget=0)
    assert admits("harmony", None, "<|channel|>final<|message|>Yes.", budget=0)


def test_text_under_a_budget_is_free_behind_the_reasoning() -> None:
    for text in ("Yes.", "<think>a\n</think>\n\nYes { [.", "<think>a</think>"):
        assert admits("optional", None, text, budget=9), text
    assert not admits("optional", None, "<think>a", budget=9)


def test_a_marker_of_several_tokens_cannot_be_forced() -> None:
    with pytest.raises(BadValue, match="is no token of its own"):
        matcher("untokenized", None, budget=5)


def test_what_constrains_nothing_has_no_grammar() -> None:
    assert reasoning_grammar(prompt_reasoning("open"), None, None) is None
