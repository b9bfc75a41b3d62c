"""Conversion of the body of `/v1/responses` into the body of a chat."""

from __future__ import annotations

from typing import Any

from specserve.api.chat_schema import (
    MAX_CALLS,
    CalledFunction,
    ChatBody,
    FunctionName,
    FunctionTool,
    Message,
    NamedTool,
    ToolBody,
    ToolCall,
)
from specserve.api.response_items.body import (
    NO_STATE,
    ResponseItem,
    ResponsesBody,
    ResponseText,
    ResponseTextOptions,
    ResponseToolName,
)
from specserve.api.schema import NamedSchema, ResponseFormat
from specserve.errors import BadValue

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
NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
"""Members of an item, by its type."""


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
        item.check_given(f"input[{index}]", NEEDED[item.type])
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
