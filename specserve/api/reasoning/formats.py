"""The formats in which models write reasoning, as one table of literal texts.

Both the grammars of answers and the parser of answers follow it. Parses no answers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from specserve.api.tools.formats import Vocabulary

PROMPT_TAIL = 16
"""Tokens at the end of a prompt among which a template opens or closes the reasoning."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The texts around reasoning, and the text that opens the answer after it."""

    opening: str
    closing: str
    answer_opening: str
    markers: tuple[str, ...]  # parts of these texts that may be tokens of their own
    template_marks: tuple[str, ...]  # what a template of a model that reasons has in it
    has_channels: bool = False  # messages with a header, as in harmony


# The format of a template is the first one whose marks it has.
FORMATS: Mapping[str, ReasoningFormat] = {
    "harmony": ReasoningFormat(
        opening="<|channel|>analysis<|message|>",
        closing="<|end|><|start|>assistant",
        answer_opening="<|channel|>final<|message|>",
        markers=(
            "<|channel|>",
            "<|message|>",
            "<|end|>",
            "<|start|>",
            "<|constrain|>",
            "<|call|>",
            "<|return|>",
        ),
        template_marks=("<|channel|>", "<|message|>"),
        has_channels=True,
    ),
    "think": ReasoningFormat(
        opening="<think>",
        closing="</think>",
        answer_opening="",
        markers=("<think>", "</think>"),
        template_marks=("</think>",),
    ),
}


class PromptState(Enum):
    """State in which a prompt ends: the answer may, must or cannot begin with reasoning."""

    OPTIONAL = auto()  # the answer opens it, if the model likes to
    OPEN = auto()  # the prompt ends in it
    CLOSED = auto()  # the prompt has closed it


@dataclass(frozen=True, slots=True)
class ModelReasoning:
    """The reasoning format of one model, in its tokens."""

    format: ReasoningFormat
    marker_ids: Mapping[str, int]  # of markers that are one token
    special_ids: Collection[int]  # tokens without a text, which reasoning does not have

    @classmethod
    def from_template(cls, template: str, vocabulary: Vocabulary) -> ModelReasoning | None:
        """Return the format that a model's template shows; None if it shows none."""
        for form in FORMATS.values():
            if all(mark in template for mark in form.template_marks):
                ids = {marker: vocabulary.added_id(marker) for marker in form.markers}
                known = {marker: token for marker, token in ids.items() if token is not None}
                return cls(form, known, vocabulary.special_ids)
        return None

    def prompt_state(self, tail: str) -> PromptState:
        """Return what a prompt leaves to the answer; `tail` is the text of its last tokens."""
        end = tail.rstrip()
        if end.endswith(self.format.opening):
            return PromptState.OPEN
        return (
            (PromptState.CLOSED if end.endswith(self.format.closing) else PromptState.OPTIONAL)
            if not self.format.has_channels
            else PromptState.OPTIONAL
        )

    def literal_parts(self, text: str) -> list[str | int]:
        """Return a text in parts: ids of markers that are one token, and the texts between."""
        if not self.marker_ids:
            return [text] if text else []
        found = re.split("(" + "|".join(map(re.escape, self.marker_ids)) + ")", text)
        return [self.marker_ids.get(part, part) for part in found if part]


@dataclass(frozen=True, slots=True)
class PromptReasoning:
    """The reasoning of the answer to one prompt."""

    model: ModelReasoning
    state: PromptState
