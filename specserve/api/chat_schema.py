"""Schemas of chats: messages, tools, and the bodies that have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from specserve.api.dialects import is_neutral
from specserve.api.field_types import JsonSchema, Label, check_depth
from specserve.api.schema import GenerationBody
from specserve.api.strict_model import Body, StrictModel, Unsupported
from specserve.errors import BadValue
from specserve.sampling_params import MAX_COUNT

# Bounds of what no other limit bounds. OpenAI takes as many messages.
MAX_MESSAGES = 2048
MAX_PARTS = 2048
MAX_TOOLS = 128
MAX_CALLS = 128
FUNCTION_NAME = r"^[A-Za-z0-9_-]{1,64}$"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class TextPart(StrictModel):
    IGNORES_UNKNOWN = True

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def is_text(cls, kind: Any) -> Any:
        if isinstance(kind, str) and kind != "text":
            raise BadValue(
                f"a part of a message has the type {kind[:40]!r}; this model takes text alone",
                param="messages",
            )
        return kind


Parts = TypeAliasType("Parts", Annotated[list[TextPart], FailFast(), Field(max_length=MAX_PARTS)])


class CalledFunction(StrictModel):
    IGNORES_UNKNOWN = True

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    arguments: str = Field(description="JSON, as the model wrote it.")


class ToolCall(StrictModel):
    IGNORES_UNKNOWN = True

    id: Label
    type: Literal["function"]
    function: CalledFunction


ToolCalls = TypeAliasType(
    "ToolCalls", Annotated[list[ToolCall], FailFast(), Field(max_length=MAX_CALLS)]
)


class Message(StrictModel):
    UNSUPPORTED: ClassVar[Unsupported] = {
        "function_call": (),
        "audio": (),
        "refusal": (),
        "annotations": ([],),
    }
    IGNORES_UNKNOWN = True

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: ToolCalls | None = Field(None, description="Of the assistant.")
    content: str | Parts | None = Field(
        None, validate_default=True, description="May be left out beside tool_calls."
    )
    name: Label | None = None
    tool_call_id: Label | None = Field(None, description="Which call a tool answers.")
    reasoning_content: str | None = Field(None, description="Of the assistant, for the template.")
    reasoning: str | None = Field(None, description="A newer name of reasoning_content.")

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


NamedTools = TypeAliasType(
    "NamedTools",
    Annotated[list[NamedTool], FailFast(), Field(max_length=MAX_TOOLS)],
)


class ToolSet(StrictModel):
    mode: Literal["auto", "required"]
    tools: NamedTools


class AllowedTools(StrictModel):
    """A choice among some of the tools; the model is shown all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSet


ChosenTools = Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
Tools = TypeAliasType("Tools", Annotated[list[ToolBody], FailFast(), Field(max_length=MAX_TOOLS)])


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    UNSUPPORTED: ClassVar[Unsupported] = {
        **GenerationBody.UNSUPPORTED,
        "audio": (),
        "function_call": ("none", "auto"),  # without functions, neither asks for anything
        "functions": ([],),
        "prediction": (),
        "add_special_tokens": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Messages
    logprobs: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = Field(
        None, description="Tokens of reasoning, behind which its end is forced; -1 is no limit."
    )
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = Field(
        None, description="auto, unless there are no tools."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether one answer may call several times; true by default."
    )
    reasoning_effort: Effort | None = Field(
        None, description="For a model whose chat template knows it; without one, none is taken."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Whether the prompt ends with the opening of an answer; true by default."
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message instead of answering it."
    )
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(check_depth)] = Field(
        None, description="Variables of the model's chat template."
    )

    @model_validator(mode="before")
    @classmethod
    def take_unbounded(cls, given: Any) -> Any:
        """Take n_predict -1, which llama.cpp's clients send for what there is room for."""
        unbounded = isinstance(given, Mapping) and is_neutral(given.get("n_predict"), (-1,))
        return {**given, "n_predict": None} if unbounded else given


class TokenizeBody(Body):
    """Body of `POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = Field(None, description="As in chats.")
    continue_final_message: bool | None = Field(None, description="As in chats.")
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(check_depth)] = Field(
        None, description="As in chats."
    )
