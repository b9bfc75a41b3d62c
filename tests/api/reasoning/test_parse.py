"""Answers are parsed into the same reasoning and content however they are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.api.reasoning.formats import ModelReasoning, PromptState
from specserve.api.reasoning.parse import HarmonyParser, ReasoningParser, ThinkParser
from tests.support.reasoners import prompt_reasoning, reasoner

CUTS = st.lists(st.integers(0, 10_000), max_size=8)


def read(parser: ReasoningParser, text: str, cuts: list[int]) -> tuple[str, str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [parser.push(text[begin:end]) for begin, end in pairwise(borders)]
    parts.append(parser.finish())
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("state", "text", "wanted"),
    [
        (PromptState.OPTIONAL, "<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", ("Hm.\n\nSo.", "Yes.\n")),
        (PromptState.OPTIONAL, "\n<think></think>Yes.", ("", "Yes.")),
        (PromptState.OPTIONAL, "No <think> here.", ("", "No <think> here.")),
        (PromptState.OPTIONAL, "<thin", ("", "<thin")),
        (PromptState.OPTIONAL, "", ("", "")),
        (PromptState.OPEN, "Hm.\n</think>\n\nYes.</think>", ("Hm.", "Yes.</think>")),
        (PromptState.OPEN, "Hm. a</b </thin", ("Hm. a</b </thin", "")),
        (PromptState.OPEN, "\n\nHm.", ("Hm.", "")),
        (PromptState.CLOSED, "Yes.\n<think>", ("", "Yes.\n<think>")),
    ],
)
@given(cuts=CUTS)
@settings(deadline=None, max_examples=40)
def test_thinking_comes_out_as_it_was_written_however_it_is_cut(
    state: PromptState, text: str, wanted: tuple[str, str], cuts: list[int]
) -> None:
    assert read(ThinkParser(state), text, cuts) == wanted


ANALYSIS = "<|channel|>analysis<|message|>Hm. a <| b<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (ANALYSIS + "<|channel|>final<|message|>Yes.", ("Hm. a <| b", "Yes.")),
        ("<|channel|>final<|message|>Yes.<|return|>", ("", "Yes.")),
        (ANALYSIS + ANALYSIS, ("Hm. a <| bHm. a <| b", "")),
        (ANALYSIS + "<|channel|>fin", ("Hm. a <| b", "")),
        ("<|channel|>commentary<|message|>First.<|end|><|start|>assistant" + CALL, None),
        (ANALYSIS + CALL + "<|call|>", ("Hm. a <| b", CALL)),
        (
            "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>" + '{"a": 1}',
            ("", CALL),
        ),
        ("<|channel|>analysis<|message|>Hm. <|e", ("Hm. <|e", "")),
        ("plain text", ("", "plain text")),
    ],
)
@given(cuts=CUTS)
@settings(deadline=None, max_examples=40)
def test_channels_come_out_as_they_were_written_however_they_are_cut(
    text: str, wanted: tuple[str, str] | None, cuts: list[int]
) -> None:
    wanted = wanted or ("", "First." + CALL)
    assert read(HarmonyParser(has_calls=True), text, cuts) == wanted


def test_no_part_of_a_marker_is_ever_shown() -> None:
    for parser, text in (
        (ThinkParser(PromptState.OPTIONAL), "<think>\nHm\n</think>\n\nYes"),
        (HarmonyParser(has_calls=False), ANALYSIS + "<|channel|>final<|message|>Yes"),
    ):
        shown = [parser.push(char) for char in text]
        assert all("<" not in content for _, content in shown)
        assert [content for _, content in shown if content] == ["Y", "e", "s"]
        assert any(reasoning == "H" for reasoning, _ in shown), "before its end is known"


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("optional", PromptState.OPTIONAL),
        ("untokenized", PromptState.OPTIONAL),
        ("open", PromptState.OPEN),
        ("closed", PromptState.CLOSED),
        ("harmony", PromptState.OPTIONAL),
    ],
)
def test_the_prompt_says_whether_the_answer_begins_in_reasoning(
    name: str, state: PromptState
) -> None:
    assert prompt_reasoning(name).state is state


def test_a_template_without_markers_shows_no_reasoning() -> None:
    assert ModelReasoning.from_template("{{ messages }}", reasoner("optional")) is None
