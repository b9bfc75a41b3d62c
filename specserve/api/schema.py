"""Schemas of the bodies that clients send, for the OpenAPI page and for a first check.

The ranges of values are checked by `Sampling` (sampling_params.py).
"""

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

# Bounds of what no other limit bounds. OpenAI takes as many messages, and as much metadata.
MAX_MESSAGES = 2048
MAX_PARTS = 2048
MAX_LABEL = 512  # characters of a name, or of what is taken and not used
MAX_METADATA = 16
MAX_TOOLS = 128
MAX_CALLS = 128
FUNCTION_NAME = r"^[A-Za-z0-9_-]{1,64}$"


def _max_entries(most: int) -> BeforeValidator:
    """Return a validator that counts entries before they are checked.

    Pydantic would report every single one, in a hundred times the memory of the body.
    """

    def check(given: Any, info: ValidationInfo) -> Any:
        if isinstance(given, Mapping) and len(given) > most:
            raise BadValue(
                f"{info.field_name} has {len(given)} entries; {most} is the most",
                param=info.field_name,
            )
        return given

    return BeforeValidator(check)


def _check_depth(given: Any) -> Any:
    """Refuse what is nested too deeply, before anything recurses into it."""
    if is_too_deep(given):
        raise PydanticCustomError("too_deep", f"it is nested more than {MAX_DEPTH} levels deep")
    return given


# A faulty list is refused at its first fault, since a body of megabytes may hold a million.
Ids = TypeAliasType("Ids", Annotated[list[int], FailFast()])
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
Label = Annotated[str, Field(max_length=MAX_LABEL)]
Prompts = TypeAliasType("Prompts", Annotated[list[str | Ids], FailFast()])
JsonSchema = Annotated[dict[str, Any], BeforeValidator(_check_depth)]


class StrictModel(BaseModel):
    """A model that refuses unknown members.

    Members of OpenAI's API are taken with the default that asks for nothing: `suffix: null` is
    harmless, `suffix: "x"` is not.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    # Names of OpenAI's API, and the values that change nothing; null is always one.
    UNSUPPORTED: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    # Members that clients add to our own answers, and send back with them.
    IGNORED: ClassVar[tuple[str, ...]] = ()

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


class StreamOptions(StrictModel):
    UNSUPPORTED = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(
        None, description="Send a chunk with the usage, and no choices, before the end."
    )


class SpeculationBody(StrictModel):
    gamma: int | Literal["auto"] | None = Field(
        None, description="Draft tokens a round; 0 turns speculation off."
    )
    verifier: Literal["auto", "speculative", "block", "coupled", "lenient"] | None = None


class NamedSchema(StrictModel):
    name: Label
    description: str | None = None
    json_schema: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Taken; the schema is obeyed either way.")


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = Field(None, description="Goes with the type json_schema.")


class Guided(StrictModel):
    """A constraint on the text; exactly one member is given."""

    regex: str | None = None
    grammar: str | None = Field(None, description="In Lark's notation, as llguidance reads it.")
    json_schema: JsonSchema | str | None = Field(None, alias="json")
    choice: Texts | None = Field(None, description="One of these texts.")


class GenerationBody(StrictModel):
    """Parameters that completions and chats share."""

    UNSUPPORTED = {
        "service_tier": ("auto", "default"),
        "store": (False,),
        "modalities": (["text"],),
    }

    model: str | None = Field(
        None, description="The served model's name; left out, it is that one."
    )
    max_tokens: int | None = Field(
        None, description="0 goes with echo or prompt_logprobs: nothing is written."
    )
    max_completion_tokens: int | None = Field(None, description="Another name for max_tokens.")
    temperature: float | None = Field(None, description="0 is greedy.")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 and -1 are off.")
    min_p: float | None = None
    n: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(
        None,
        description="New tokens before which no end token or stop token is written, and no stop "
        "string ends the text.",
    )
    bad_words: Texts | None = Field(
        None, description="Texts that are not written, at the start of a word or inside the text."
    )
    allowed_token_ids: Ids | None = Field(None, description="No other tokens are written.")
    priority: int | None = Field(
        None, description="A lower one runs first, among the waiting requests of the same client."
    )
    seed: int | None = Field(
        None,
        description="Makes the text repeatable, whatever drafts and whatever else is in the batch.",
    )
    top_logprobs: int | None = Field(None, description="Goes with logprobs true.")
    prompt_logprobs: int | None = Field(
        None, description="So many alternatives to each token of the prompt, with its own logprob."
    )
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, _max_entries(MAX_BIASES)] = Field(
        None, description="Token ids and what is added to their logits."
    )
    response_format: ResponseFormat | None = Field(None, description="What the text must be.")
    guided: Guided | None = Field(
        None, description="What the text must be, in another form; the four below say the same."
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
    metadata: Annotated[dict[Label, Label] | None, _max_entries(MAX_METADATA)] = None
    cache_salt: Annotated[Label | None, Field(min_length=1)] = Field(
        None, description="Pages are shared only with prompts of the same salt."
    )


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`."""

    UNSUPPORTED = {**GenerationBody.UNSUPPORTED, "best_of": (1,), "suffix": ("",)}

    prompt: str | Ids | Prompts = Field(description="A text, token ids, or a list of both.")
    echo: bool | None = None
    logprobs: bool | int | None = Field(
        None, description="A number asks for that many alternatives to each token."
    )


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


Parts = TypeAliasType("Parts", Annotated[list[TextPart], FailFast(), Field(max_length=MAX_PARTS)])


class CalledFunction(StrictModel):
    IGNORED = ("parsed_arguments",)

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    arguments: str = Field(description="JSON, as the model wrote it.")


class ToolCall(StrictModel):
    IGNORED = ("index",)

    id: Label
    type: Literal["function"]
    function: CalledFunction


ToolCalls = TypeAliasType(
    "ToolCalls", Annotated[list[ToolCall], FailFast(), Field(max_length=MAX_CALLS)]
)


class Message(StrictModel):
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
        """Refuse a message without content, unless it has calls."""
        if content is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "a text is needed, except beside tool_calls")
        return content


Messages = TypeAliasType(
    "Messages", Annotated[list[Message], FailFast(), Field(max_length=MAX_MESSAGES)]
)


class FunctionTool(StrictModel):
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: JsonSchema | None = Field(
        None, description="A JSON schema of an object; left out, there are none."
    )
    strict: bool | None = Field(None, description="Taken; arguments obey the schema either way.")


class ToolBody(StrictModel):
    type: Literal["function"]
    function: FunctionTool


class FunctionName(StrictModel):
    name: Label


class NamedTool(StrictModel):
    type: Literal["function"]
    function: FunctionName


Tools = TypeAliasType("Tools", Annotated[list[ToolBody], FailFast(), Field(max_length=MAX_TOOLS)])


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    UNSUPPORTED = {
        **GenerationBody.UNSUPPORTED,
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


class TokenizeBody(StrictModel):
    """Body of `POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True


class DetokenizeBody(StrictModel):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: Ids


class ErrorBody(BaseModel):
    """The error itself."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Body of every error response."""

    error: ErrorBody
