"""The shape of what clients send, for the OpenAPI page and for a first check. The ranges of values are `Sampling`'s to judge (request.py)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationInfo, model_validator
from typing_extensions import TypeAliasType

from specserve.errors import BadValue
from specserve.request import MAX_BIASES

# What nothing else bounds. OpenAI takes as many messages, and as much metadata.
MAX_MESSAGES, MAX_PARTS = 2048, 2048
MAX_LABEL = 512  # characters of what is taken and not used, or merely names
MAX_METADATA = 16


def _entries(most: int) -> BeforeValidator:
    """Counted before anything else: pydantic would complain of every single one, in a hundred times the memory of the body."""

    def check(given: Any, info: ValidationInfo) -> Any:
        if isinstance(given, Mapping) and len(given) > most:
            raise BadValue(f"{info.field_name} has {len(given)} entries; {most} is the most", param=info.field_name)
        return given

    return BeforeValidator(check)


# A faulty list is refused at its first fault: a body of megabytes may hold a million of them.
Ids = TypeAliasType("Ids", Annotated[list[int], FailFast()])
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
Label = Annotated[str, Field(max_length=MAX_LABEL)]
Prompts = TypeAliasType("Prompts", Annotated[list[str | Ids], FailFast()])


class Shape(BaseModel):
    """Refuses what it does not know, unless it is a default of OpenAI's that asks for nothing: `suffix: null` is harmless, `suffix: "x"` is not."""

    model_config = ConfigDict(strict=True, extra="forbid")

    UNSUPPORTED: ClassVar[Mapping[str, tuple[object, ...]]] = {}  # names of OpenAI's API, and the values that change nothing; null is always one

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for name in given:
            if name in cls.model_fields:
                continue
            if name not in cls.UNSUPPORTED:
                near = difflib.get_close_matches(name[:100], cls.model_fields, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise BadValue(f"unknown parameter {name[:100]!r}{hint}", param=name[:100])
            if given[name] is not None and given[name] not in cls.UNSUPPORTED[name]:
                raise BadValue(f"{name} is not supported", param=name)
        return {name: value for name, value in given.items() if name in cls.model_fields}


class StreamOptions(Shape):
    UNSUPPORTED = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(None, description="Send a chunk with the usage, and no choices, before the end.")


class SpeculationBody(Shape):
    gamma: int | Literal["auto"] | None = Field(None, description="Draft tokens a round; 0 turns speculation off.")
    verifier: Literal["auto", "speculative", "block", "coupled", "lenient"] | None = None


class ResponseFormat(Shape):
    type: Literal["text"]


class Generate(Shape):
    """What both ways of asking have in common."""

    UNSUPPORTED = {
        "service_tier": ("auto", "default"),
        "store": (False,),
        "modalities": (["text"],),
    }

    model: str | None = Field(None, description="The served model's name; left out, it is that one.")
    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(None, description="Another name for max_tokens.")
    temperature: float | None = Field(None, description="0 is greedy.")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 is off.")
    min_p: float | None = None
    n: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    seed: int | None = Field(None, description="Makes the text repeatable, whatever drafts and whoever shares the batch.")
    top_logprobs: int | None = Field(None, description="Goes with logprobs true.")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, _entries(MAX_BIASES)] = Field(None, description="Token ids and what is added to their logits.")
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationBody | None = None
    user: Label | None = Field(None, description="Taken and not used, like the three below.")
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    metadata: Annotated[dict[Label, Label] | None, _entries(MAX_METADATA)] = None


class CompletionBody(Generate):
    """`POST /v1/completions`"""

    UNSUPPORTED = {**Generate.UNSUPPORTED, "best_of": (1,), "suffix": ("",)}

    prompt: str | Ids | Prompts = Field(description="A text, token ids, or a list of both.")
    echo: bool | None = None
    logprobs: bool | int | None = Field(None, description="A number asks for that many alternatives to each token.")


class TextPart(Shape):
    type: Literal["text"]
    text: str


Parts = TypeAliasType("Parts", Annotated[list[TextPart], FailFast(), Field(max_length=MAX_PARTS)])


class Message(Shape):
    UNSUPPORTED = {"tool_calls": ([],), "function_call": (), "audio": (), "refusal": (), "annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts
    name: Label | None = None
    tool_call_id: Label | None = None


Messages = TypeAliasType("Messages", Annotated[list[Message], FailFast(), Field(max_length=MAX_MESSAGES)])


class ChatBody(Generate):
    """`POST /v1/chat/completions`"""

    UNSUPPORTED = {
        **Generate.UNSUPPORTED,
        "audio": (),
        "function_call": ("none", "auto"),  # without functions, neither asks for anything
        "functions": ([],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "reasoning_effort": ("none",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Messages
    logprobs: bool | None = None


class TokenizeBody(Shape):
    """`POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Shape):
    """`POST /detokenize`"""

    model: str | None = None
    tokens: Ids


class ErrorBody(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Every refusal."""

    error: ErrorBody
