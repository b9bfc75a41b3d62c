"""Messages as templates know them: no developers, no parts, calls with arguments that are read, and plain words where a template knows no calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from specserve.api.schema import Message, ToolCall
from specserve.api.tools.formats import Format, Spelling

TOLD = """You may call functions. To call one, write nothing but this, with its name and its arguments in place of those in capitals:
{example}
It is answered in a message of the role tool. The functions, each in JSON with the schema of its arguments:
{tools}"""


def for_template(
    messages: Sequence[Message], tools: Sequence[Mapping[str, object]], spelling: Spelling
) -> list[dict[str, object]]:
    """A template that knows calls renders tools and calls itself; for any other they are put in words."""
    plain = [_plain(message, spelling) for message in messages]
    return plain if spelling.taught or not tools else _told(plain, tools, spelling.format)


def _plain(message: Message, spelling: Spelling) -> dict[str, object]:
    form, calls = spelling.format, message.tool_calls or ()
    plain: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message),
    }
    if calls and spelling.taught:
        plain["tool_calls"] = [_call(call, form) for call in calls]
    elif calls:
        plain["content"] = _content(message) + form.written(
            [(call.function.name, call.function.arguments) for call in calls]
        )
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = form.call_id(message.tool_call_id)
    return plain


def _content(message: Message) -> str:
    content = message.content or ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _call(call: ToolCall, form: Format) -> dict[str, object]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": form.call_id(call.id), "type": "function", "function": function}


def _arguments(text: str) -> object:
    """Templates write JSON themselves. What was cut, and is none, they get as it is."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return read if isinstance(read, dict) else text


def _told(
    messages: list[dict[str, object]], tools: Sequence[Mapping[str, object]], form: Format
) -> list[dict[str, object]]:
    words = TOLD.format(
        example=form.written([("NAME", "ARGUMENTS")]),
        tools="\n".join(json.dumps(tool["function"]) for tool in tools),
    )
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{words}"}, *messages[1:]]
    return [{"role": "system", "content": words}, *messages]
