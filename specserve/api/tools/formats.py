"""The formats in which models write tool calls, as one table of literal texts.

Both the grammars of answers and the parser of answers follow it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from specserve.api.tools.arguments import ArgumentStyle, render_arguments
from specserve.api.tools.parameters import FunctionKinds


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The texts of calls: `prefix`, name, `infix`, arguments, `suffix`, and `end` after the last.

    Each further call has `next_prefix` for `prefix`.
    """

    prefix: str
    infix: str
    suffix: str
    next_prefix: str | None = None  # None: there is never a second call
    end: str = ""
    arguments: ArgumentStyle = ArgumentStyle.JSON
    # The beginning of `prefix`, at which free text ends. If it is empty, calls are the beginning of
    # the answer, and no other answer begins with the first character of `prefix`.
    trigger: str = ""
    prelude: str = ""  # a special token that may precede calls,
    postlude: str = ""  # and one that may follow them
    answer_opening: str = ""  # what an answer without calls begins with
    template_marks: tuple[str, ...] = ()  # what a template that teaches this format has in it,
    excluded_marks: tuple[str, ...] = ()  # and what it has not
    id_length: int | None = None  # of the ids that the template takes; None: any
    has_text_arguments: bool = False  # the template takes arguments as text, not as an object

    @property
    def is_channel(self) -> bool:
        """True if calls and other answers are messages of different channels."""
        return bool(self.answer_opening)

    @property
    def markers(self) -> tuple[str, ...]:
        """Parts of the format that may be special tokens."""
        return tuple(
            marker
            for marker in MARKERS
            if any(
                marker in text
                for text in (
                    self.prefix,
                    self.infix,
                    self.suffix,
                    self.end,
                    self.prelude,
                    self.postlude,
                    self.answer_opening,
                )
            )
        )

    def call_id(self, given: str) -> str:
        """Return an id that the template takes; equal for equal ids."""
        if self.id_length is None or (len(given) == self.id_length and given.isalnum()):
            return given
        return hashlib.blake2b(given.encode()).hexdigest()[: self.id_length]

    def render(self, calls: list[tuple[str, str]]) -> str:
        """Return the text of calls, each a name and arguments in JSON."""
        texts = [
            name + self.infix + render_arguments(self.arguments, arguments) + self.suffix
            for name, arguments in calls
        ]
        return self.prefix + (self.next_prefix or self.prefix).join(texts) + self.end


def _deepseek(name: str) -> str:
    """Return one of DeepSeek's special tokens, with its wide bars and its low block for a space."""
    return "<\uff5c" + name.replace(" ", "\u2581") + "\uff5c>"


_CALLS, _CALLS_END = _deepseek("tool calls begin"), _deepseek("tool calls end")
_CALL, _CALL_END = _deepseek("tool call begin"), _deepseek("tool call end")
_SEPARATOR = _deepseek("tool sep")
MARKERS = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    _CALLS,
    _CALLS_END,
    _CALL,
    _CALL_END,
    _SEPARATOR,
)

# The format of a template is the first one whose marks it has.
FORMATS: Mapping[str, CallFormat] = {
    "mistral_named": CallFormat(
        prefix="[TOOL_CALLS]",
        infix="[ARGS]",
        suffix="",
        next_prefix="[TOOL_CALLS]",
        trigger="[TOOL_CALLS]",
        template_marks=("[TOOL_CALLS]", "[ARGS]"),
        id_length=9,
    ),
    "mistral": CallFormat(
        prefix='[TOOL_CALLS][{"name": "',
        infix='", "arguments": ',
        suffix="}",
        next_prefix=', {"name": "',
        end="]",
        trigger="[TOOL_CALLS]",
        template_marks=("[TOOL_CALLS]",),
        id_length=9,
    ),
    "hermes": CallFormat(
        prefix='<tool_call>\n{"name": "',
        infix='", "arguments": ',
        suffix="}\n</tool_call>",
        next_prefix='\n<tool_call>\n{"name": "',
        trigger="<tool_call>",
        template_marks=("<tool_call>",),
        excluded_marks=("<function=", "<arg_key>"),  # others write XML between the same tags
    ),
    "qwen3_coder": CallFormat(
        prefix="<tool_call>\n<function=",
        infix=">\n",
        suffix="</function>\n</tool_call>",
        next_prefix="\n<tool_call>\n<function=",
        arguments=ArgumentStyle.TAGS,
        trigger="<tool_call>",
        template_marks=("<tool_call>", "<function=", "<parameter="),
    ),
    "harmony": CallFormat(
        prefix="<|channel|>commentary to=functions.",
        infix=" <|constrain|>json<|message|>",
        suffix="",  # the token <|call|> ends the text
        trigger="<|channel|>",
        answer_opening="<|channel|>final<|message|>",
        template_marks=("<|channel|>", "<|message|>", "<|call|>"),
    ),
    "deepseek_v3": CallFormat(
        prefix=f"{_CALLS}{_CALL}function{_SEPARATOR}",
        infix="\n```json\n",
        suffix=f"\n```{_CALL_END}",
        next_prefix=f"\n{_CALL}function{_SEPARATOR}",
        end=_CALLS_END,
        trigger=_CALLS,
        template_marks=(_CALLS, "```json"),
        has_text_arguments=True,
    ),
    "deepseek_v31": CallFormat(
        prefix=f"{_CALLS}{_CALL}",
        infix=_SEPARATOR,
        suffix=_CALL_END,
        next_prefix=_CALL,
        end=_CALLS_END,
        trigger=_CALLS,
        template_marks=(_CALLS,),
        has_text_arguments=True,
    ),
    "llama_pythonic": CallFormat(
        prefix="[",
        infix="(",
        suffix=")",
        next_prefix=", ",
        end="]",
        arguments=ArgumentStyle.KEYWORDS,
        prelude="<|python_start|>",  # Llama 4 has these tokens, and uses them or not
        postlude="<|python_end|>",
        template_marks=("[func_name1(",),
    ),
    "llama": CallFormat(
        prefix='{"name": "',
        infix='", "parameters": ',
        suffix="}",
        prelude="<|python_tag|>",
        template_marks=('"parameters": ', "<|eot_id|>"),
    ),
}
DEFAULT_FORMAT = FORMATS["hermes"]  # if the template teaches none


class Vocabulary(Protocol):
    """A tokenizer's added tokens."""

    def added_id(self, name: str) -> int | None:
        """Return None for what is no added token."""
        ...

    @property
    def special_ids(self) -> Collection[int]:
        """Added tokens without a text."""
        ...


@dataclass(frozen=True, slots=True)
class ModelCallFormat:
    """The call format of one model, in its tokens."""

    format: CallFormat
    special_ids: Mapping[str, int]  # of markers that are one token, which an answer must show
    in_template: bool  # the model's own template teaches the format and renders tools and calls
    kinds: FunctionKinds = field(default_factory=dict)  # of the parameters that a request offers

    @classmethod
    def from_template(cls, template: str, vocabulary: Vocabulary) -> ModelCallFormat:
        """Return the format that a model's template teaches, or the default one."""
        recognised = next(_recognise(template), None)
        form = recognised or DEFAULT_FORMAT
        ids = {marker: vocabulary.added_id(marker) for marker in form.markers}
        return cls(
            form,
            {marker: token for marker, token in ids.items() if token is not None},
            in_template=recognised is not None and "tools" in template,
        )


def _recognise(template: str) -> Iterator[CallFormat]:
    for form in FORMATS.values():
        if (
            ("tools" in template or form.has_text_arguments)  # DeepSeek's show calls without tools
            and all(mark in template for mark in form.template_marks)
            and not any(mark in template for mark in form.excluded_marks)
        ):
            spaced = "[TOOL_CALLS] [" in template  # older tokenizers put a space there
            yield replace(form, prefix=form.prefix.replace("][", "] [")) if spaced else form
