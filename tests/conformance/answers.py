"""The texts that a scripted engine may answer with, the fittest first.

They follow from a prompt in the template of tests/support/templates.py alone: a tool that the last
message names is called, a tool's result is repeated, and everything else is echoed. Numbers and
names of the message become arguments. Knows no tokens and no HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specserve.api.tools.formats import FORMATS
from specserve.types import Grammar

CALL_FORMAT = FORMATS["hermes"]
Schema = Mapping[str, Any]

_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_CALLED = re.compile(r'<tool_call>\n\{"name": "([^"]+)"')
_TOOLS_END = "Call within <tool_call></tool_call>."
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_NAME = re.compile(r"'([^']+)'|\"([^\"]+)\"|\b([A-Z]\w+(?: [A-Z]\w+)*(?:, [A-Z]{2}\b)?)")
_NO_NAMES = frozenset(
    "What Which Who How Is Are Please Call Use Extract Give Tell Return Generate The And Add "
    "Turn You My Compute Find Get Say Hi Hello It In Of A".split()
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A rendered prompt: the turns, each with its role, and the tools that are offered."""

    turns: Sequence[tuple[str, str]]
    tools: Mapping[str, Schema]  # parameters by name

    @classmethod
    def from_prompt(cls, prompt: str) -> Conversation:
        turns: list[tuple[str, str]] = _TURN.findall(prompt)
        tools: dict[str, Schema] = {}
        if turns and turns[0][1].endswith(_TOOLS_END):
            for line in turns.pop(0)[1].splitlines()[:-1]:
                function = json.loads(line)["function"]
                tools[function["name"]] = function["parameters"]
        return cls(turns or [("user", prompt)], tools)

    @property
    def question(self) -> str:
        """Last message of the user's."""
        return next((text for role, text in reversed(self.turns) if role == "user"), "")

    @property
    def results(self) -> list[str]:
        """Results of tools since the last message of the user's, the latest first."""
        found = []
        for role, text in reversed(self.turns):
            if role == "user":
                break
            if role == "tool":
                found.append(text)
        return found

    @property
    def called(self) -> set[str]:
        return {name for role, text in self.turns for name in _CALLED.findall(text)}

    def named_tools(self) -> list[str]:
        """Return the tools that the question names, or the one that shares a word with it."""
        asked = self.question.lower()
        named = [name for name in self.tools if re.search(rf"\b{re.escape(name.lower())}\b", asked)]
        related = [name for name in self.tools if _words(name) & set(re.findall(r"[a-z]+", asked))]
        return named or related[:1]


def _words(name: str) -> set[str]:
    return {word for word in re.findall(r"[a-z]+", name.lower()) if len(word) > 3}


def answers(prompt: str, grammar: Grammar | None = None) -> Iterator[str]:
    """Yield texts for a prompt; an engine takes the first that the grammar admits."""
    talk = Conversation.from_prompt(prompt)
    source = "\n".join([*talk.results, talk.question])
    if talk.results:
        yield f"The result is {', '.join(reversed(talk.results))}."
    elif named := talk.named_tools():
        yield CALL_FORMAT.render([(name, _arguments(talk, name, source)) for name in named])
        yield CALL_FORMAT.render([(named[0], _arguments(talk, named[0], source))])
    else:
        num_questions = sum(role == "user" for role, _ in talk.turns)
        yield f"Answer {num_questions}: you said {talk.question}"
    for schema in _schemas(grammar):
        yield json.dumps(fill(schema, source), ensure_ascii=False)
    for name in sorted(talk.tools, key=lambda name: name in talk.called):
        yield CALL_FORMAT.render([(name, _arguments(talk, name, source))])


def _arguments(talk: Conversation, name: str, source: str) -> str:
    return json.dumps(fill(talk.tools[name], source), ensure_ascii=False)


def _schemas(grammar: Grammar | None) -> Iterator[Schema]:
    """Yield the JSON schemas of a grammar, which may stand among the rules of another notation."""
    if grammar is None:
        return
    if grammar.kind == "json_schema":
        yield json.loads(grammar.text)
        return
    for found in re.finditer(r"%json\s*(?=\{)", grammar.text):
        yield json.JSONDecoder().raw_decode(grammar.text, found.end())[0]


def fill(schema: Schema, source: str) -> Any:
    """Return a value that follows a schema, of the numbers and names of a text."""
    return _Values(schema, source).value(schema)


@dataclass
class _Values:
    """The numbers and names of a text, which are used up in their order."""

    root: Schema
    source: str
    numbers: list[str] = field(init=False)
    quoted: list[str] = field(init=False)
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = _NUMBER.findall(self.source)
        found: list[tuple[str, str, str]] = _NAME.findall(self.source)
        self.quoted = ["".join(groups[:2]) for groups in found if not groups[2]]
        self.names = [*self.quoted, *(name for *_, name in found if name and name not in _NO_NAMES)]

    def value(self, schema: Schema) -> Any:
        schema = self._resolve(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            text = self.source.lower()
            options = schema["enum"]
            return next((one for one in options if str(one).lower() in text), options[0])
        kind = schema.get("type", "object")
        kind = kind[0] if isinstance(kind, list) else kind
        return getattr(self, f"_{kind}")(schema)

    def _resolve(self, schema: Schema) -> Schema:
        if "$ref" in schema:
            target: Any = self.root
            for part in schema["$ref"].removeprefix("#/").split("/"):
                target = target[part]
            return self._resolve(target)
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                options = [one for one in schema[name] if one.get("type") != "null"]
                return self._resolve(options[0])
        return schema

    def _object(self, schema: Schema) -> dict[str, Any]:
        """Return the required members; of an object that names none, those in quotation marks."""
        if "properties" not in schema:
            return {name: self.source.strip() for name in self.quoted}
        properties = schema["properties"]
        required = schema.get("required") or properties
        return {name: self.value(each) for name, each in properties.items() if name in required}

    def _array(self, schema: Schema) -> list[Any]:
        items = self._resolve(schema.get("items", {"type": "string"}))
        kept = {"integer": self.numbers, "number": self.numbers, "string": self.names}
        count = max(len(kept.get(items.get("type", ""), ())), schema.get("minItems", 1), 1)
        return [self.value(items) for _ in range(min(count, schema.get("maxItems", count)))]

    def _integer(self, schema: Schema) -> int:
        return round(self._number(schema))

    def _number(self, schema: Schema) -> float:
        number = float(self.numbers.pop(0)) if self.numbers else 1.0
        least, most = schema.get("minimum", number), schema.get("maximum", number)
        return float(min(max(number, least), most))

    def _string(self, schema: Schema) -> str:
        return self.names.pop(0) if self.names else self.source.strip()[:40]

    def _boolean(self, schema: Schema) -> bool:
        return True

    def _null(self, schema: Schema) -> None:
        return None
