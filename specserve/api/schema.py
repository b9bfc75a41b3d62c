"""The shape of what clients send, for the OpenAPI page and for a first check. The ranges of values are `Sampling`'s to judge (request.py)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from specserve.errors import BadValue
from specserve.grammar.request import MAX_DEPTH, is_too_deep
from specserve.sampling_params import MAX_BIASES

# What nothing else bounds. OpenAI takes as many messages, and as much metadata.
MAX_MESSAGES, MAX_PARTS = 2048, 2048
MAX_LABEL = 512  # characters of what is taken and not used, or merely names
MAX_METADATA = 16
MAX_TOOLS, MAX_CALLS = 128, 128
FUNCTION = r"^[A-Za-z0-9_-]{1,64}$"  # its name


def _entries(most: int) -> BeforeValidator:
    """Counted before anything else: pydantic would complain of every single one, in a hundred times the memory of the body."""

    def check(given: Any, info: ValidationInfo) -> Any:
        if isinstance(given, Mapping) and len(given) > most:
            raise BadValue(
                f"{info.field_name} has {len(given)} entries; {most} is the most",
                param=info.field_name,
            )
        return given

    return BeforeValidator(check)


def _shallow(given: Any) -> Any:
    """What is nested too deeply is refused before anybody follows it down."""
    if is_too_deep(given):
        raise PydanticCustomError("too_deep", f"it is nested more than {MAX_DEPTH} levels deep")
    return given


# A faulty list is refused at its first fault: a body of megabytes may hold a million of them.
Ids = TypeAliasType("Ids", Annotated[list[int], FailFast()])
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
Label = Annotated[str, Field(max_length=MAX_LABEL)]
Prompts = TypeAliasType("Prompts", Annotated[list[str | Ids], FailFast()])
JsonSchema = Annotated[dict[str, Any], BeforeValidator(_shallow)]


class Shape(BaseModel):
    """Refuses what it does not know, unless it is a default of OpenAI's that asks for nothing: `suffix: null` is harmless, `suffix: "x"` is not."""

    model_config = ConfigDict(strict=True, extra="forbid")

    UNSUPPORTED: ClassVar[
        Mapping[str, tuple[object, ...]]
    ] = {}  # names of OpenAI's API, and the values that change nothing; null is always one
    IGNORED: ClassVar[
        tuple[str, ...]
    ] = ()  # what clients keep beside our own answers, and send back with them

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in given:
            if name in known or name in cls.IGNORED:
                continue
            if name not in cls.UNSUPPORTED:
                near = difflib.get_close_matches(name[:100], known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise BadValue(f"unknown parameter {name[:100]!r}{hint}", param=name[:100])
            if given[name] is not None and given[name] not in cls.UNSUPPORTED[name]:
                raise BadValue(f"{name} is not supported", param=name)
        return {name: value for name, value in given.items() if name in known}


class StreamOptions(Shape):
    UNSUPPORTED = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(
        None, description="Send a chunk with the usage, and no choices, before the end."
    )


class SpeculationBody(Shape):
    gamma: int | Literal["auto"] | None = Field(
        None, description="Draft tokens a round; 0 turns speculation off."
    )
    verifier: Literal["auto", "speculative", "block", "coupled", "lenient"] | None = None


class NamedSchema(Shape):
    name: Label
    description: str | None = None
    json_schema: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Taken; the schema is obeyed either way.")


class ResponseFormat(Shape):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = Field(None, description="Goes with the type json_schema.")


class Guided(Shape):
    """Exactly one of them."""

    regex: str | None = None
    grammar: str | None = Field(None, description="In Lark's notation, as llguidance reads it.")
    json_schema: JsonSchema | str | None = Field(None, alias="json")
    choice: Texts | None = Field(None, description="One of these texts.")


class Generate(Shape):
    """What both ways of asking have in common."""

    UNSUPPORTED = {
        "service_tier": ("auto", "default"),
        "store": (False,),
        "modalities": (["text"],),
    }

    model: str | None = Field(
        None, description="The served model's name; left out, it is that one."
    )
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
    seed: int | None = Field(
        None, description="Makes the text repeatable, whatever drafts and whoever shares the batch."
    )
    top_logprobs: int | None = Field(None, description="Goes with logprobs true.")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, _entries(MAX_BIASES)] = Field(
        None, description="Token ids and what is added to their logits."
    )
    response_format: ResponseFormat | None = Field(None, description="What the text must be.")
    guided: Guided | None = Field(
        None, description="What the text must be, otherwise said; the four below say the same."
    )
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_json: JsonSchema | str | None = None
    guided_choice: Texts | None = None
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
    logprobs: bool | int | None = Field(
        None, description="A number asks for that many alternatives to each token."
    )


class TextPart(Shape):
    type: Literal["text"]
    text: str


Parts = TypeAliasType("Parts", Annotated[list[TextPart], FailFast(), Field(max_length=MAX_PARTS)])


class CalledFunction(Shape):
    IGNORED = ("parsed_arguments",)

    name: Annotated[str, Field(pattern=FUNCTION)]
    arguments: str = Field(description="JSON, as the model wrote it.")


class ToolCall(Shape):
    IGNORED = ("index",)

    id: Label
    type: Literal["function"]
    function: CalledFunction


ToolCalls = TypeAliasType(
    "ToolCalls", Annotated[list[ToolCall], FailFast(), Field(max_length=MAX_CALLS)]
)


class Message(Shape):
    UNSUPPORTED = {"function_call": (), "audio": (), "refusal": (), "annotations": ([],)}
    IGNORED = ("parsed",)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: ToolCalls | None = Field(None, description="Of the assistant.")
    content: str | Parts | None = Field(
        None, validate_default=True, description="May be left out beside tool_calls."
    )
    name: Label | None = None
    tool_call_id: Label | None = Field(None, description="Which call a tool answers.")

    @field_validator("tool_calls")
    @classmethod
    def belong_to_the_assistant(
        cls, calls: list[ToolCall] | None, info: ValidationInfo
    ) -> list[ToolCall] | None:
        if calls and info.data.get("role") != "assistant":
            raise PydanticCustomError("misplaced", "only the assistant's messages have tool_calls")
        return calls

    @field_validator("content")
    @classmethod
    def is_there(
        cls, content: str | list[TextPart] | None, info: ValidationInfo
    ) -> str | list[TextPart] | None:
        """Unless the message was to call something."""
        if content is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "a text is needed, except beside tool_calls")
        return content


Messages = TypeAliasType(
    "Messages", Annotated[list[Message], FailFast(), Field(max_length=MAX_MESSAGES)]
)


class FunctionTool(Shape):
    name: Annotated[str, Field(pattern=FUNCTION)]
    description: str | None = None
    parameters: JsonSchema | None = Field(
        None, description="A JSON schema of an object; left out, there are none."
    )
    strict: bool | None = Field(None, description="Taken; arguments obey the schema either way.")


class ToolBody(Shape):
    type: Literal["function"]
    function: FunctionTool


class FunctionName(Shape):
    name: Label


class NamedTool(Shape):
    type: Literal["function"]
    function: FunctionName


Tools = TypeAliasType("Tools", Annotated[list[ToolBody], FailFast(), Field(max_length=MAX_TOOLS)])


class ChatBody(Generate):
    """`POST /v1/chat/completions`"""

    UNSUPPORTED = {
        **Generate.UNSUPPORTED,
        "audio": (),
        "function_call": ("none", "auto"),  # without functions, neither asks for anything
        "functions": ([],),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Messages
    logprobs: bool | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="auto, unless there are no tools."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether one answer may call several times; true by default."
    )


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
