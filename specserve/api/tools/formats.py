"""How models write calls of functions: one table of literal texts, from which grammars are made and by which answers are read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Format:
    """A call reads `first`, its name, `middle`, its arguments, `after`; each further call has `next` for `first`; behind the last comes `end`."""

    first: str
    middle: str
    after: str
    next: str | None = None  # None: there is never a second call
    end: str = ""
    trigger: str = ""  # `first` begins with it, and free text ends at it; "": calls begin the answer, and no other answer begins with {
    prelude: str = ""  # a special token that may stand before calls
    marks: tuple[str, ...] = ()  # what a template that teaches this format has in it,
    strangers: tuple[str, ...] = ()  # and what it has not
    id_length: int | None = None  # of the ids that the template takes; None: any

    @property
    def markers(self) -> tuple[str, ...]:
        """Parts of it that may be tokens without a text."""
        return tuple(
            marker
            for marker in MARKERS
            if any(marker in text for text in (self.first, self.middle, self.after, self.prelude))
        )

    def call_id(self, given: str) -> str:
        """An id as the template takes it; equal for equal ids."""
        if self.id_length is None or (len(given) == self.id_length and given.isalnum()):
            return given
        return hashlib.blake2b(given.encode()).hexdigest()[: self.id_length]

    def written(self, calls: list[tuple[str, str]]) -> str:
        """The text of calls, each a name and arguments in JSON."""
        texts = [name + self.middle + arguments + self.after for name, arguments in calls]
        return self.first + (self.next or self.first).join(texts) + self.end


MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")

FORMATS: Mapping[str, Format] = {  # a template's is the first whose marks it has
    "mistral_named": Format(
        first="[TOOL_CALLS]",
        middle="[ARGS]",
        after="",
        next="[TOOL_CALLS]",
        trigger="[TOOL_CALLS]",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        id_length=9,
    ),
    "mistral": Format(
        first='[TOOL_CALLS][{"name": "',
        middle='", "arguments": ',
        after="}",
        next=', {"name": "',
        end="]",
        trigger="[TOOL_CALLS]",
        marks=("[TOOL_CALLS]",),
        id_length=9,
    ),
    "hermes": Format(
        first='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        after="}\n</tool_call>",
        next='\n<tool_call>\n{"name": "',
        trigger="<tool_call>",
        marks=("<tool_call>",),
        strangers=("<function=", "<arg_key>"),  # others write XML between the same tags
    ),
    "llama": Format(
        first='{"name": "',
        middle='", "parameters": ',
        after="}",
        prelude="<|python_tag|>",
        marks=('"parameters": ', "<|eot_id|>"),
    ),
}
PLAIN = FORMATS["hermes"]  # where the template teaches none


class Vocabulary(Protocol):
    """Of a tokenizer."""

    def special_id(self, name: str) -> int | None: ...  # None: it is no token, or one with a text


@dataclass(frozen=True, slots=True)
class Spelling:
    """A format in one model's tokens."""

    format: Format
    special: Mapping[
        str, int
    ]  # markers that are tokens without a text, which an answer has to show nevertheless
    taught: bool  # by the model's own template, which then renders tools and calls itself

    @classmethod
    def of(cls, template: str, vocabulary: Vocabulary) -> Spelling:
        """By what the model's template says; models without one are told the plain format."""
        known = next(_recognised(template), None)
        form = known or PLAIN
        ids = {marker: vocabulary.special_id(marker) for marker in form.markers}
        return cls(
            form,
            {marker: token for marker, token in ids.items() if token is not None},
            taught=known is not None,
        )


def _recognised(template: str) -> Iterator[Format]:
    for form in FORMATS.values():
        if (
            "tools" in template
            and all(mark in template for mark in form.marks)
            and not any(stranger in template for stranger in form.strangers)
        ):
            spaced = "[TOOL_CALLS] [" in template  # older tokenizers put it there
            yield replace(form, first=form.first.replace("][", "] [")) if spaced else form
