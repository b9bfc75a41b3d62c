"""Schemas of `/v1/messages`: the bodies of a message and of a count, and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, FailFast, Field, field_validator
from typing_extensions import TypeAliasType

from specserve.api.chat_schema import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Parts
from specserve.api.field_types import JsonSchema, Label, Texts, check_depth
from specserve.api.schema import SpeculationBody
from specserve.api.strict_model import Body, StrictModel, Unsupported
from specserve.errors import BadValue
from specserve.sampling_params import MAX_COUNT

BLOCKS = ("text", "thinking", "tool_use", "tool_result")
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


class MessageBlock(StrictModel):
    """A text, the assistant's thinking or call, or the result of a call; `type` says which."""

    IGNORES_UNKNOWN = True

    type: Literal["text", "thinking", "tool_use", "tool_result"]
    text: str | None = Field(None, description="Of a text.")
    thinking: str | None = Field(None, description="Of thinking, for the template.")
    id: Label | None = Field(None, description="Of a call.")
    name: ToolName | None = Field(None, description="Of the tool that is called.")
    input: Annotated[dict[str, Any] | None, BeforeValidator(check_depth)] = Field(
        None, description="Of a call: its arguments."
    )
    tool_use_id: Label | None = Field(None, description="Which call a result answers.")
    content: str | Parts | None = Field(None, description="Of a result.")
    is_error: bool | None = Field(None, description="Taken; the content says what failed.")

    @field_validator("type", mode="before")
    @classmethod
    def is_known(cls, kind: Any) -> Any:
        if isinstance(kind, str) and kind not in BLOCKS:
            raise BadValue(
                f"a block of a message has the type {kind[:40]!r}; this model takes "
                f"{', '.join(BLOCKS[:-1])} and {BLOCKS[-1]}",
                param="messages",
            )
        return kind


MessageBlocks = TypeAliasType(
    "MessageBlocks", Annotated[list[MessageBlock], FailFast(), Field(max_length=MAX_PARTS)]
)


class MessageTurn(StrictModel):
    IGNORES_UNKNOWN = True

    role: Literal["user", "assistant", "system"]
    content: str | MessageBlocks


MessageTurns = TypeAliasType(
    "MessageTurns",
    Annotated[list[MessageTurn], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)],
)


class MessageTool(StrictModel):
    UNSUPPORTED: ClassVar[Unsupported] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "eager_input_streaming": (False, True),
        "input_examples": ([],),
    }
    IGNORED = ("cache_control",)

    name: ToolName
    input_schema: JsonSchema
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = Field(None, description="Taken; arguments obey the schema either way.")


MessageTools = TypeAliasType(
    "MessageTools", Annotated[list[MessageTool], FailFast(), Field(max_length=MAX_TOOLS)]
)


class MessageToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Label | None = Field(None, description="Goes with the type tool.")
    disable_parallel_tool_use: bool | None = None


class MessageThinking(StrictModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = Field(
        None, description="Tokens of thinking, after which its end is forced."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="Taken; thinking is shown as it was written."
    )


class MessageOutputFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema = Field(alias="schema")


class MessageOutputConfig(StrictModel):
    UNSUPPORTED: ClassVar[Unsupported] = {"task_budget": ()}

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For a chat template that reads reasoning_effort; others ignore it."
    )
    format: MessageOutputFormat | None = Field(None, description="What the text must be.")


class MessageMetadata(StrictModel):
    user_id: Label | None = None


class CountTokensBody(Body):
    """Body of `POST /v1/messages/count_tokens`."""

    UNSUPPORTED: ClassVar[Unsupported] = {
        "compaction": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }

    messages: MessageTurns
    model: str | None = Field(
        None, description="The served model's name; left out, it is that one."
    )
    system: str | Parts | None = None
    tools: MessageTools | None = Field(None, description="The client's own; others are refused.")
    tool_choice: MessageToolChoice | None = None
    thinking: MessageThinking | None = Field(None, description="Left out, the template decides.")
    cache_control: dict[str, Any] | None = Field(
        None, description="Taken; prompts that begin alike share pages either way."
    )
    context_management: dict[str, Any] | None = Field(
        None, description="Ignored: the prompt is what the client sends."
    )
    output_config: MessageOutputConfig | None = None

    @field_validator("tools", mode="before")
    @classmethod
    def refuse_server_tools(cls, given: Any) -> Any:
        for index, tool in enumerate(given if isinstance(given, list) else ()):
            kind = tool.get("type") if isinstance(tool, Mapping) else None
            if isinstance(kind, str) and kind != "custom":
                param = f"tools[{index}].type"
                raise BadValue(
                    f"{param} {kind[:64]!r} is not supported: this server has no tools of its "
                    "own; give a name and an input_schema",
                    param=param,
                )
        return given


class MessagesBody(CountTokensBody):
    """Body of `POST /v1/messages`."""

    UNSUPPORTED: ClassVar[Unsupported] = {
        **CountTokensBody.UNSUPPORTED,
        "container": (),
        "inference_geo": (),
        "service_tier": ("auto", "standard_only"),
        "thread": (),
    }

    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] = Field(
        description="Thinking included. A text ends where the context does, too."
    )
    temperature: float | None = Field(
        None, description="0 is greedy. Left out, it is what the model recommends, or 1."
    )
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 is off.")
    stop_sequences: Texts | None = None
    stream: bool | None = None
    seed: int | None = None
    speculation: SpeculationBody | None = None
    priority: int | None = Field(None, description="As in chats.")
    cache_salt: Annotated[Label, Field(min_length=1)] | None = None
    metadata: MessageMetadata | None = Field(None, description="Taken and not used.")
    diagnostics: dict[str, Any] | None = Field(
        None, description="Ignored: why a prompt was not cached is not known."
    )
    fallbacks: str | list[dict[str, Any]] | None = Field(
        None, description="Taken; no request is declined for another model to answer."
    )


class MessagesErrorBody(BaseModel):
    """The error itself, as clients of messages take it."""

    type: str
    message: str


class MessagesError(BaseModel):
    """Body of every error response of `/v1/messages`."""

    type: Literal["error"]
    error: MessagesErrorBody
    request_id: str
