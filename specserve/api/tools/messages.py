"""Convert a chat's messages into those that a model's template takes.

Templates know no role `developer` and no content in parts, and take the arguments of a call as
parsed JSON. For a template without tool calls, tools and calls are put into the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from specserve.api.chat_schema import Message, ToolCall
from specserve.api.tools.formats import CallFormat, ModelCallFormat

INSTRUCTIONS = (
    "You may call functions. To call one, write nothing but this, with its name and its arguments "
    "in place of those in capitals:\n"
    "{example}\n"
    "It is answered in a message of the role tool. The functions, each in JSON with the schema "
    "of its arguments:\n"
    "{tools}"
)


def to_template_messages(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]],
    call_format: ModelCallFormat,
) -> list[dict[str, object]]:
    """Return messages for the template, with instructions unless it renders the tools itself."""
    converted = [_convert(message, call_format) for message in messages]
    return (
        converted
        if call_format.in_template or not tools
        else _add_instructions(converted, tools, call_format.format)
    )


def _convert(message: Message, call_format: ModelCallFormat) -> dict[str, object]:
    form, calls = call_format.format, message.tool_calls or ()
    converted: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message),
    }
    if calls and call_format.in_template:
        converted["tool_calls"] = [_convert_call(call, form) for call in calls]
    elif calls:
        converted["content"] = _content(message) + form.render(
            [(call.function.name, call.function.arguments) for call in calls]
        )
    if reasoning := message.reasoning_content or message.reasoning:
        # Templates of most families know the first name, and gpt-oss' the second.
        converted |= {"reasoning_content": reasoning, "thinking": reasoning}
    if message.name is not None:
        converted["name"] = message.name
    if message.tool_call_id is not None:
        converted["tool_call_id"] = form.call_id(message.tool_call_id)
    return converted


def _content(message: Message) -> str:
    content = message.content or ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _convert_call(call: ToolCall, form: CallFormat) -> dict[str, object]:
    given = call.function.arguments
    arguments = given if form.has_text_arguments else _parse_arguments(given)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": form.call_id(call.id), "type": "function", "function": function}


def _parse_arguments(text: str) -> object:
    """Return the arguments' object, since templates write JSON themselves.

    Arguments that were cut, and are no JSON, stay text.
    """
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


def _add_instructions(
    messages: list[dict[str, object]], tools: Sequence[Mapping[str, object]], form: CallFormat
) -> list[dict[str, object]]:
    text = INSTRUCTIONS.format(
        example=form.render([("NAME", "ARGUMENTS")]),
        tools="\n".join(json.dumps(tool["function"]) for tool in tools),
    )
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
