"""Schema of the body of `/v1/responses`.

Keeps no conversations: what refers to an earlier response is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field, field_validator
from typing_extensions import TypeAliasType

from specserve.api.chat_schema import (
    FUNCTION_NAME,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    FunctionTool,
)
from specserve.api.field_types import MAX_LABEL, JsonSchema, Label, Texts, max_entries
from specserve.api.schema import MAX_METADATA, SpeculationBody
from specserve.api.strict_model import Body, StrictModel, Unsupported
from specserve.errors import BadValue
from specserve.sampling_params import MAX_COUNT

NO_STATE = "this server keeps no responses; send the whole conversation as input"


class ResponseText(StrictModel):
    UNSUPPORTED: ClassVar[Unsupported] = {"prompt_cache_breakpoint": ()}
    IGNORED = ("annotations", "logprobs")

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


ResponseTexts = TypeAliasType(
    "ResponseTexts", Annotated[list[ResponseText], FailFast(), Field(max_length=MAX_PARTS)]
)


class ResponseItem(StrictModel):
    """A message, a call of a function, its output, or reasoning; `type` says which."""

    IGNORED = ("id", "status", "summary", "encrypted_content", "phase", "parsed_arguments")

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = Field(
        None, description="Of a message."
    )
    content: str | ResponseTexts | None = Field(None, description="Of a message, or of reasoning.")
    call_id: Label | None = Field(None, description="Of a call, and of its output.")
    name: Annotated[str, Field(pattern=FUNCTION_NAME)] | None = Field(
        None, description="Of the function that is called."
    )
    arguments: str | None = Field(None, description="Of a call: JSON, as the model wrote it.")
    output: str | ResponseTexts | None = Field(None, description="Of a call.")


ResponseInput = TypeAliasType(
    "ResponseInput",
    Annotated[list[ResponseItem], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)],
)


class ResponseTool(FunctionTool):
    UNSUPPORTED: ClassVar[Unsupported] = {"defer_loading": (False,)}

    type: Literal["function"]


class ResponseToolName(StrictModel):
    type: Literal["function"]
    name: Annotated[str, Field(max_length=MAX_LABEL)]


class ResponseTextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: Label | None = None
    description: str | None = None
    json_schema: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Taken; the schema is obeyed either way.")


class ResponseTextOptions(StrictModel):
    UNSUPPORTED: ClassVar[Unsupported] = {"verbosity": ("medium",)}

    format: ResponseTextFormat | None = None


class ResponseReasoning(StrictModel):
    UNSUPPORTED: ClassVar[Unsupported] = {
        "effort": ("none",),
        "summary": (),
        "generate_summary": (),
    }


ResponseTools = TypeAliasType(
    "ResponseTools", Annotated[list[ResponseTool], FailFast(), Field(max_length=MAX_TOOLS)]
)


class ResponsesBody(Body):
    """Body of `POST /v1/responses`."""

    CHECKED_LATER: ClassVar[frozenset[str]] = frozenset({"input"})
    UNSUPPORTED: ClassVar[Unsupported] = {
        "context_management": ([],),
        "conversation": (),
        "include": ([],),
        "max_tool_calls": (),
        "prompt": (),
        "service_tier": ("auto", "default"),
        "stream_options": ({"include_obfuscation": False}, {"include_usage": True}),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    input: str | ResponseInput = Field(description="A text, or items in the order of the talk.")
    model: str | None = Field(
        None, description="The served model's name; left out, it is that one."
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = Field(
        None, description="Reasoning included."
    )
    temperature: float | None = Field(
        None, description="0 is greedy. Left out, it is what the model recommends, or 1."
    )
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 is off.")
    min_p: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    text: ResponseTextOptions | None = Field(None, description="What the text must be.")
    tools: ResponseTools | None = Field(None, description="Functions; other tools are refused.")
    tool_choice: Literal["none", "auto", "required"] | ResponseToolName | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponseReasoning | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = Field(
        None, description="Tokens of reasoning, behind which its end is forced; -1 is no limit."
    )
    speculation: SpeculationBody | None = None
    cache_salt: Annotated[Label, Field(min_length=1)] | None = None
    store: bool | None = Field(None, description="Taken; nothing is stored either way.")
    previous_response_id: str | None = Field(None, description="Refused: nothing is stored.")
    background: bool | None = Field(None, description="True is refused: nothing is stored.")
    user: Label | None = Field(None, description="Taken and not used, like the three below.")
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    metadata: Annotated[dict[Label, Label] | None, max_entries(MAX_METADATA)] = None

    @field_validator("input", mode="before")
    @classmethod
    def refuse_references(cls, given: Any) -> Any:
        for index, kind in _kinds(given):
            if kind == "item_reference":
                param = f"input[{index}]"
                raise BadValue(f"{param} refers to a stored item: {NO_STATE}", param=param)
        return given

    @field_validator("tools", mode="before")
    @classmethod
    def refuse_built_in_tools(cls, given: Any) -> Any:
        for index, kind in _kinds(given):
            if isinstance(kind, str) and kind != "function":
                param = f"tools[{index}].type"
                raise BadValue(
                    f"{param} {kind[:64]!r} is not supported: this server runs no tools; "
                    "it calls functions, which its clients run",
                    param=param,
                )
        return given


def _kinds(given: Any) -> Iterator[tuple[int, object]]:
    for index, one in enumerate(given if isinstance(given, list) else ()):
        if isinstance(one, Mapping):
            yield index, one.get("type")
