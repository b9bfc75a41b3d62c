"""Schema of the body of `/v1/responses`, and its conversion into the body of a chat.

Keeps no conversations: what refers to an earlier response is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field, field_validator
from typing_extensions import TypeAliasType

from specserve.api.schema import (
    FUNCTION_NAME,
    MAX_CALLS,
    MAX_LABEL,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_PARTS,
    MAX_TOOLS,
    CalledFunction,
    ChatBody,
    FunctionName,
    FunctionTool,
    JsonSchema,
    Label,
    Message,
    NamedSchema,
    NamedTool,
    ResponseFormat,
    SpeculationBody,
    Texts,
    ToolBody,
    ToolCall,
    max_entries,
)
from specserve.api.strict_model import Body, StrictModel, Unsupported
from specserve.errors import BadValue
from specserve.sampling_params import MAX_COUNT

NO_STATE = "this server keeps no responses; send the whole conversation as input"
COPIED = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
    "stream",
    "speculation",
    "cache_salt",
    "thinking_token_budget",
    "parallel_tool_calls",
)
"""Parameters that chats have by the same name."""


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
        "stream_options": ({"include_obfuscation": False},),
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
    temperature: float | None = Field(None, description="0 is greedy.")
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


def to_chat(body: ResponsesBody) -> ChatBody:
    """Return the chat that a body asks for. Raises BadValue for what would need stored responses.

    Its parts are not validated again: they were validated in `body`.
    """
    for name in ("previous_response_id", "background"):
        if getattr(body, name):
            raise BadValue(f"{name} is not supported: {NO_STATE}", param=name)
    choice = body.tool_choice
    return ChatBody.model_construct(
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        response_format=_response_format(body.text),
        tools=[
            ToolBody(
                type="function",
                function=FunctionTool.model_construct(
                    name=tool.name, description=tool.description, parameters=tool.parameters
                ),
            )
            for tool in body.tools or ()
        ],
        tool_choice=NamedTool(type="function", function=FunctionName(name=choice.name))
        if isinstance(choice, ResponseToolName)
        else choice,
        **{name: getattr(body, name) for name in COPIED},
    )


def _response_format(text: ResponseTextOptions | None) -> ResponseFormat | None:
    given = None if text is None else text.format
    if given is None:
        return None
    if given.type != "json_schema":
        return ResponseFormat.model_construct(type=given.type, json_schema=None)
    if given.json_schema is None:
        raise BadValue("text.format.schema goes with the type json_schema", param="text.format")
    schema = NamedSchema.model_construct(name=given.name or "answer", json_schema=given.json_schema)
    return ResponseFormat.model_construct(type="json_schema", json_schema=schema)


def _messages(body: ResponsesBody) -> list[Message]:
    messages = [] if body.instructions is None else [_message("system", body.instructions)]
    if isinstance(body.input, str):
        return [*messages, _message("user", body.input)]
    reasoning = ""  # of the assistant, before what it says or calls
    for index, item in enumerate(body.input):
        if item.type == "reasoning":
            reasoning = _text(item.content)
            continue
        _check_members(f"input[{index}]", item)
        if item.type == "message":
            messages.append(_message(item.role or "user", _text(item.content)))
        elif item.type == "function_call_output":
            messages.append(_message("tool", _text(item.output), tool_call_id=item.call_id))
        else:
            _add_call(messages, item)
        if messages[-1].role == "assistant" and reasoning:
            messages[-1].reasoning_content = reasoning
        reasoning = ""
    if not messages:
        raise BadValue("input has nothing to answer", param="input")
    return messages


def _check_members(path: str, item: ResponseItem) -> None:
    needed = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
    }
    for name in needed[item.type]:
        if getattr(item, name) is None:
            raise BadValue(f"{path}.{name} is needed in a {item.type}", param=f"{path}.{name}")


def _add_call(messages: list[Message], item: ResponseItem) -> None:
    """Add a call to the assistant's message before it, or to a new one."""
    assert item.call_id is not None
    assert item.name is not None
    assert item.arguments is not None
    function = CalledFunction(name=item.name, arguments=item.arguments)
    call = ToolCall(id=item.call_id, type="function", function=function)
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or len(last.tool_calls or ()) >= MAX_CALLS:
        messages.append(_message("assistant", "", tool_calls=[call]))
    else:
        last.tool_calls = [*(last.tool_calls or ()), call]


def _message(role: str, content: str, **members: Any) -> Message:
    return Message.model_construct(role=role, content=content, **members)


def _text(content: str | list[ResponseText] | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())
