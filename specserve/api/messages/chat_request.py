"""Conversion of the bodies of `/v1/messages` into the body of a chat."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from specserve.api.chat_schema import (
    CalledFunction,
    ChatBody,
    FunctionName,
    FunctionTool,
    Message,
    NamedTool,
    TextPart,
    ToolBody,
    ToolCall,
)
from specserve.api.messages.body import (
    CountTokensBody,
    MessageBlock,
    MessageOutputConfig,
    MessageThinking,
    MessageToolChoice,
    MessageTurn,
)
from specserve.api.reasoning.grammar import BUDGET
from specserve.api.schema import NamedSchema, ResponseFormat
from specserve.errors import BadValue

COPIED = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stream",
    "speculation",
    "priority",
    "cache_salt",
)
"""Parameters that chats have by the same name."""
BLOCKS_OF_ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""Members of a block, by its type."""
EFFORT = "reasoning_effort"
"""Name of a chat's parameter, and of the variable by which templates read it."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off."""


def to_chat(
    body: CountTokensBody, *, has_reasoning: bool, template_variables: Collection[str]
) -> ChatBody:
    """Return the chat that a body of messages asks for.

    Its parts are not validated again: they were validated in `body`.
    """
    messages = _messages(body)
    choice = body.tool_choice
    given = {name: value for name in COPIED if (value := getattr(body, name, None)) is not None}
    chat = ChatBody.model_construct(
        messages=messages,
        stop=getattr(body, "stop_sequences", None),
        tools=[
            ToolBody(
                type="function",
                function=FunctionTool.model_construct(
                    name=tool.name, description=tool.description, parameters=tool.input_schema
                ),
            )
            for tool in body.tools or ()
        ],
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=choice is None or choice.disable_parallel_tool_use is not True,
        # An answer continues the assistant's own words, as Anthropic's does.
        continue_final_message=messages[-1].role == "assistant",
        **_thinking(body.thinking, has_reasoning, template_variables),
        **_output(body.output_config, template_variables),
        **given,
    )
    chat._sent_names = {
        "stop": "stop_sequences",
        BUDGET: "thinking",
        "response_format": "output_config.format",
    }
    for index in range(len(body.tools or ())):
        path = f"tools[{index}]"
        chat._sent_names[f"{path}.function.parameters"] = f"{path}.input_schema"
        chat._sent_names[f"{path}.function.name"] = f"{path}.name"
    return chat


def ignored_names(
    body: CountTokensBody, *, has_reasoning: bool, template_variables: Collection[str]
) -> list[str]:
    """Return the names of what a body asks for and the answer does without."""
    thinking, output = body.thinking, body.output_config
    ignored = {
        "context_management": bool(body.context_management),
        "diagnostics": bool(getattr(body, "diagnostics", None)),
        "thinking": thinking is not None and thinking.type == "adaptive" and not has_reasoning,
        "thinking.display": thinking is not None and thinking.display == "omitted",
        "output_config.effort": output is not None
        and output.effort is not None
        and EFFORT not in template_variables,
    }
    return [name for name, is_ignored in ignored.items() if is_ignored]


def _tool_choice(choice: MessageToolChoice) -> Any:
    if choice.type == "tool":
        choice.check_given("tool_choice", ("name",))
        assert choice.name is not None
        return NamedTool(type="function", function=FunctionName(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def _thinking(
    thinking: MessageThinking | None, has_reasoning: bool, variables: Collection[str]
) -> dict[str, Any]:
    """Return the template's switch, and the limit of the reasoning's tokens.

    Without a switch, reasoning is turned off by the limit 0. A model that does not reason takes
    adaptive, which leaves it to the model.
    """
    if thinking is None:
        return {}
    is_on = thinking.type != "disabled"
    if thinking.type == "enabled" and not has_reasoning:
        raise BadValue(
            "thinking is not supported: this model's template shows no known form of reasoning",
            param="thinking",
        )
    switches = {name: is_on for name in SWITCHES if name in variables}
    budget = thinking.budget_tokens if is_on else 0 if has_reasoning and not switches else None
    return {"chat_template_kwargs": switches or None, BUDGET: budget}


def _output(config: MessageOutputConfig | None, variables: Collection[str]) -> dict[str, Any]:
    """Return the constraint on the text, and the effort if the template reads it."""
    if config is None:
        return {}
    given: dict[str, Any] = {}
    if config.effort is not None and EFFORT in variables:
        given[EFFORT] = "xhigh" if config.effort == "max" else config.effort
    if config.format is not None:
        schema = NamedSchema.model_construct(name="answer", json_schema=config.format.json_schema)
        given["response_format"] = ResponseFormat.model_construct(
            type="json_schema", json_schema=schema
        )
    return given


def _messages(body: CountTokensBody) -> list[Message]:
    messages = [] if body.system is None else [_message("system", _text(body.system))]
    for index, turn in enumerate(body.messages):
        _check_blocks(f"messages[{index}]", turn)
        if isinstance(turn.content, str):
            messages.append(_message(turn.role, turn.content))
        elif turn.role == "assistant":
            messages.append(_assistant_message(turn.content))
        else:
            messages += _input_messages(turn.role, turn.content)
    if messages[-1].tool_calls:
        raise BadValue(
            "messages end with a tool_use, which needs its tool_result", param="messages"
        )
    return messages


def _check_blocks(path: str, turn: MessageTurn) -> None:
    for index, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
        where = f"{path}.content[{index}]"
        if block.type not in BLOCKS_OF_ROLES[turn.role]:
            raise BadValue(
                f"{where} is a {block.type}, which messages of the role {turn.role} have not",
                param=where,
            )
        block.check_given(where, NEEDED[block.type])


def _assistant_message(blocks: Sequence[MessageBlock]) -> Message:
    calls = [
        ToolCall.model_construct(
            id=block.id,
            type="function",
            function=CalledFunction.model_construct(
                name=block.name, arguments=json.dumps(block.input, ensure_ascii=False)
            ),
        )
        for block in blocks
        if block.type == "tool_use"
    ]
    reasoning = "\n".join(block.thinking or "" for block in blocks if block.type == "thinking")
    return _message(
        "assistant", _text(blocks), tool_calls=calls or None, reasoning_content=reasoning or None
    )


def _input_messages(role: str, blocks: Sequence[MessageBlock]) -> Iterator[Message]:
    """Yield the results of calls, each in a message of its own, and texts that stand together."""
    texts: list[MessageBlock] = []
    for block in blocks:
        if block.type == "text":
            texts.append(block)
            continue
        if texts:
            yield _message(role, _text(texts))
            texts = []
        yield _message("tool", _text(block.content or ""), tool_call_id=block.tool_use_id)
    if texts or not blocks:
        yield _message(role, _text(texts))


def _message(role: str, content: str, **members: Any) -> Message:
    return Message.model_construct(role=role, content=content, **members)


def _text(content: str | Sequence[MessageBlock] | Sequence[TextPart]) -> str:
    """Return the texts of a content, joined as the parts of a chat's message are."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text or "" for part in content if part.type == "text")
