"""The tools that a chat offers: which of them an answer may or must call, and its grammar.

Parses no answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specserve.api.chat_schema import AllowedTools, ChatBody, FunctionTool, NamedTool
from specserve.api.constraints import constraint_name
from specserve.api.tools.arguments import ArgumentStyle
from specserve.api.tools.formats import ModelCallFormat
from specserve.api.tools.grammar import CallGrammar
from specserve.api.tools.parameters import parse_parameters
from specserve.errors import BadValue
from specserve.grammar.request import MAX_SIZE, schema_grammar
from specserve.grammar.validate import validate_grammar
from specserve.types import Grammar

# Spaces as templates write them in JSON, and as models have therefore learnt them. Any other space
# would be a needless choice.
SEPARATORS: Mapping[str, object] = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}
NO_PARAMETERS: Mapping[str, object] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that is offered; `param` is the path of its parameters in the body."""

    param: str
    name: str
    definition: Mapping[str, object]  # as templates take it
    arguments: Grammar  # a JSON schema


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of one request, of which an answer may call `callable`."""

    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    must_call: bool
    parallel: bool  # one answer may call several times

    @property
    def definitions(self) -> list[Mapping[str, object]]:
        return [tool.definition for tool in self.tools]

    @property
    def size(self) -> int:
        """Characters that the tools add to a prompt, approximately."""
        return len(json.dumps(self.definitions))

    def check(self, call_format: ModelCallFormat, answer: Grammar | None) -> None:
        """Raise BadValue naming the tool whose arguments no grammar can follow.

        Large schemas take a while.
        """
        for tool in self.callable:
            try:
                validate_grammar(tool.arguments)
                if call_format.format.arguments is not ArgumentStyle.JSON:
                    parse_parameters(tool.arguments.text)
            except BadValue as error:
                raise BadValue(f"{tool.param}: {error}", param=tool.param) from error
        # The check has no tokenizer, so that ids of special tokens would mean nothing.
        without_ids = replace(call_format, special_ids={})
        try:
            validate_grammar(Grammar("lark", self.grammar(without_ids, answer)))
        except BadValue as error:
            raise BadValue(f"tools together: {error}", param="tools") from error

    def typed_format(self, call_format: ModelCallFormat) -> ModelCallFormat:
        """Return the format with the kinds of parameters, if its texts do not show them."""
        if call_format.format.arguments is not ArgumentStyle.TAGS:
            return call_format
        kinds = {
            tool.name: {one.name: one.kind for one in parse_parameters(tool.arguments.text)}
            for tool in self.callable
        }
        return replace(call_format, kinds=kinds)

    def grammar(self, call_format: ModelCallFormat, answer: Grammar | None) -> str:
        """Return the grammar of calls, or of calls or an answer if no call is demanded.

        `answer` is the schema of an answer without calls; None allows any text.
        """
        call_grammar = CallGrammar(
            call_format,
            [(tool.name, _add_separators(tool.arguments)) for tool in self.callable],
            parallel=self.parallel,
        )
        text = (
            call_grammar.calls_only()
            if self.must_call
            else call_grammar.calls_or_text()
            if answer is None
            else call_grammar.calls_or_json(_add_separators(answer))
        )
        if len(text) > MAX_SIZE:
            raise BadValue(
                f"they come to {len(text)} characters as a grammar; {MAX_SIZE} is the most",
                param="tools",
            )
        return text


def _add_separators(schema: Grammar) -> str:
    return json.dumps(json.loads(schema.text) | SEPARATORS)


def parse_offer(body: ChatBody) -> Offer | None:
    """Return the tools that may be called, or None.

    With tool_choice none there is no offer: the template does not show the tools either.
    """
    choice = body.tool_choice
    tools = _parse_tools(body)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadValue("tool_choice wants a call, and there are no tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    _check_conflicts(body)
    if isinstance(choice, NamedTool):
        return Offer(tools, (_find_tool(choice, tools),), must_call=True, parallel=False)
    if isinstance(choice, AllowedTools):
        if not choice.allowed_tools.tools:
            raise BadValue("tool_choice allows none of the tools", param="tool_choice")
        allowed = [_find_tool(one, tools) for one in choice.allowed_tools.tools]
        return Offer(
            tools,
            tuple(tool for tool in tools if tool in allowed),
            must_call=choice.allowed_tools.mode == "required",
            parallel=body.parallel_tool_calls is not False,
        )
    return Offer(
        tools, tools, must_call=choice == "required", parallel=body.parallel_tool_calls is not False
    )


def _parse_tools(body: ChatBody) -> tuple[Tool, ...]:
    tools = tuple(
        _parse_tool(f"tools[{i}].function", given.function)
        for i, given in enumerate(body.tools or ())
    )
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            param = f"tools[{i}].function.name"
            raise BadValue(
                f"{param} {name!r} is that of another tool; give each its own", param=param
            )
    return tools


def _parse_tool(path: str, given: FunctionTool) -> Tool:
    schema = NO_PARAMETERS if given.parameters is None else given.parameters
    param = f"{path}.parameters"
    if schema.get("type", "object") != "object":
        raise BadValue(f"{param} must be the schema of an object", param=param)
    function: dict[str, object] = {
        "name": given.name,
        "description": given.description or "",
        "parameters": schema,
    }
    arguments = schema_grammar(param, {"type": "object", **schema})
    return Tool(param, given.name, {"type": "function", "function": function}, arguments)


def _find_tool(choice: NamedTool, tools: Sequence[Tool]) -> Tool:
    name = choice.function.name
    for tool in tools:
        if tool.name == name:
            return tool
    names = ", ".join(tool.name for tool in tools)
    raise BadValue(
        f"tool_choice names {name[:64]!r}, which is none of the tools: {names[:150]}",
        param="tool_choice",
    )


def _check_conflicts(body: ChatBody) -> None:
    """Raise BadValue for parameters that exclude tools. Tools are a grammar, and a text has one."""
    name = constraint_name(body)
    if name is not None:
        raise BadValue(
            f"{name} and tools both say what the text must be; "
            "give one of them, or tool_choice none",
            param=name,
        )
    if body.ignore_eos:
        raise BadValue(
            "ignore_eos and tools exclude one another: a call ends where it ends",
            param="ignore_eos",
        )
