"""What a chat may call: the functions that were offered, which of them it may or must call, and the grammar that follows. Reads no answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specserve.api.schema import ChatBody, FunctionTool, NamedTool
from specserve.api.tools.formats import Spelling
from specserve.api.tools.grammar import CallGrammar
from specserve.errors import BadValue
from specserve.grammar.request import MAX_SIZE, schema_grammar
from specserve.grammar.validate import check
from specserve.types import Grammar

# As templates write JSON, and as models have therefore learnt it; any other space would be a needless choice.
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
    """A function that was offered; `param` is where its parameters are."""

    param: str
    name: str
    shown: Mapping[str, object]  # as templates know it
    arguments: Grammar  # a JSON schema


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of one request, of which an answer may call `callable`."""

    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    must_call: bool
    repeats: bool  # one answer may call several times

    @property
    def shown(self) -> list[Mapping[str, object]]:
        return [tool.shown for tool in self.tools]

    @property
    def size(self) -> int:
        """Characters that tools add to a prompt, about."""
        return len(json.dumps(self.shown))

    def check(self, spelling: Spelling, answer: Grammar | None) -> None:
        """Raises BadValue naming the tool whose arguments no grammar can follow. Takes a while for large ones."""
        for tool in self.callable:
            try:
                check(tool.arguments)
            except BadValue as error:
                raise BadValue(f"{tool.param}: {error}", param=tool.param) from error
        in_words = replace(spelling, special={})  # without a tokenizer, ids of tokens mean nothing
        try:
            check(Grammar("lark", self.grammar(in_words, answer)))
        except BadValue as error:
            raise BadValue(f"tools together: {error}", param="tools") from error

    def grammar(self, spelling: Spelling, answer: Grammar | None) -> str:
        """Of calls, or of a text instead where none need be; `answer`, a schema, says which."""
        made = CallGrammar(
            spelling,
            [(tool.name, _spaced(tool.arguments)) for tool in self.callable],
            repeats=self.repeats,
        )
        text = (
            made.calls_only()
            if self.must_call
            else made.calls_or_text()
            if answer is None
            else made.calls_or_json(_spaced(answer))
        )
        if len(text) > MAX_SIZE:
            raise BadValue(
                f"they come to {len(text)} characters as a grammar; {MAX_SIZE} is the most",
                param="tools",
            )
        return text


def _spaced(schema: Grammar) -> str:
    return json.dumps(json.loads(schema.text) | SEPARATORS)


def offered(body: ChatBody) -> Offer | None:
    """None where nothing may be called: tools that may not be called are not shown either."""
    choice = body.tool_choice
    tools = _tools(body)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadValue("tool_choice wants a call, and there are no tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    _check_company(body)
    if isinstance(choice, NamedTool):
        return Offer(tools, (_named(choice, tools),), must_call=True, repeats=False)
    return Offer(
        tools, tools, must_call=choice == "required", repeats=body.parallel_tool_calls is not False
    )


def _tools(body: ChatBody) -> tuple[Tool, ...]:
    tools = tuple(
        _tool(f"tools[{i}].function", given.function) for i, given in enumerate(body.tools or ())
    )
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            where = f"tools[{i}].function.name"
            raise BadValue(
                f"{where} {name!r} is that of another tool; give each its own", param=where
            )
    return tools


def _tool(param: str, given: FunctionTool) -> Tool:
    schema = NO_PARAMETERS if given.parameters is None else given.parameters
    where = f"{param}.parameters"
    if schema.get("type", "object") != "object":
        raise BadValue(f"{where} must be the schema of an object", param=where)
    shown: dict[str, object] = {
        "name": given.name,
        "description": given.description or "",
        "parameters": schema,
    }
    arguments = schema_grammar(where, {"type": "object", **schema})
    return Tool(where, given.name, {"type": "function", "function": shown}, arguments)


def _named(choice: NamedTool, tools: Sequence[Tool]) -> Tool:
    name = choice.function.name
    for tool in tools:
        if tool.name == name:
            return tool
    raise BadValue(
        f"tool_choice names {name[:64]!r}, which is none of the tools: {', '.join(tool.name for tool in tools)[:150]}",
        param="tool_choice",
    )


def _check_company(body: ChatBody) -> None:
    """Tools are a grammar, and a text has one."""
    for name in ("guided", "guided_regex", "guided_grammar", "guided_json", "guided_choice"):
        if getattr(body, name) is not None:
            raise BadValue(
                f"{name} and tools both say what the text must be; give one of them, or tool_choice none",
                param=name,
            )
    if body.ignore_eos:
        raise BadValue(
            "ignore_eos and tools exclude one another: a call ends where it ends",
            param="ignore_eos",
        )
