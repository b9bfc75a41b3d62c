"""Arguments of which each stands between tags of its own, as Qwen3-Coder writes them.

Their grammar, and a reader that turns them into JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from specserve.api.tools.parameters import VALUE_END, Parameter, ParameterKind, parse_parameters
from specserve.api.tools.reader import MalformedArguments, StepReader, escape, literal, overlap

_TAG = re.compile(r"<parameter=([^<>\n]+)>(\n?)")
_TAG_BEGIN = "<parameter="
_TAGS_END = "</function>"


def tagged_rules(rule: str, schema: str) -> list[str]:
    """Return rules of arguments of which each stands between tags of its own."""
    parameters = parse_parameters(schema)
    names = [f"{rule}_{i}" for i in range(len(parameters))]
    marked = (
        name + ("" if one.is_required else "?") for name, one in zip(names, parameters, strict=True)
    )
    rules = [f"{rule}: " + (" ".join(marked) or '""')]
    for name, one in zip(names, parameters, strict=True):
        opening = json.dumps(f"<parameter={one.name}>\n")
        rules += [f'{name}: {opening} {name}_value "\\n"', *_tagged_value(f"{name}_value", one)]
    return rules


def _tagged_value(rule: str, parameter: Parameter) -> list[str]:
    end, schema = json.dumps(VALUE_END), parameter.text
    if schema is None:
        words = ' | "True" | "False"' if parameter.is_boolean else ""
        return [f"{rule}: ({parameter.json_grammar}{words}) {end}"]
    null = ' | "null"' if parameter.kind is ParameterKind.NULLABLE_TEXT else ""
    choices = schema.get("enum")
    if isinstance(choices, list):
        texts = " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)
        return [f"{rule}: ({texts}{null}) {end}"]
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    text = rf"/(.|\n){{{low},{high}}}/ & ~/(.|\n)*\n<\/parameter>(.|\n)*/"
    if (low, high) == (0, ""):  # so that null is a text of it, too
        return [f"{rule}[lazy]: {rule.upper()} {end}", rf"{rule.upper()}: /(.|\n)*/"]
    return [
        f"{rule}: {rule}_any" + (f' | "null" {end}' if null else ""),
        f"{rule}_any[lazy]: {rule.upper()} {end}",
        f"{rule.upper()}: {text}",
    ]


class TagsReader(StepReader):
    """Reader of values between tags. Texts come as they are written, other values whole."""

    def __init__(self, kinds: Mapping[str, ParameterKind]) -> None:
        super().__init__()
        self._kinds = kinds
        self._kind, self._value_end = ParameterKind.JSON, VALUE_END

    def _read_key(self) -> bool:
        self._pending = self._pending.lstrip()
        if self._pending.startswith(_TAGS_END):
            return self._close()
        tag = _TAG.match(self._pending)
        if tag is None or tag.end() == len(self._pending):
            if tag is None and not self._may_become_tag():
                raise MalformedArguments
            return False  # a line break after the tag belongs to it
        self._take(tag.end())
        self._open(tag[1])
        self._kind = self._kinds.get(tag[1], ParameterKind.JSON)
        self._value_end = VALUE_END if tag[2] else VALUE_END.lstrip()
        self._step = self._read_value
        return True

    def _may_become_tag(self) -> bool:
        if any(text.startswith(self._pending) for text in (_TAG_BEGIN, _TAGS_END)):
            return True
        name = self._pending.removeprefix(_TAG_BEGIN)
        return name != self._pending and not set(name) & set("<>\n")

    def _read_value(self) -> bool:
        end = self._pending.find(self._value_end)
        if self._kind is ParameterKind.TEXT:
            self._json += '"'
            self._step = self._read_text
            return True
        if self._kind is ParameterKind.NULLABLE_TEXT and self._pending[:end] != "null":
            if end < 0 and ("null" + self._value_end).startswith(self._pending):
                return False
            self._kind = ParameterKind.TEXT
            return True
        if end < 0:
            return False
        self._json += _as_json(self._take(end))
        return self._end_value()

    def _read_text(self) -> bool:
        end = self._pending.find(self._value_end)
        length = len(self._pending) - overlap(self._pending, self._value_end) if end < 0 else end
        self._json += escape(self._take(length))
        if end < 0:
            return False
        self._json += '"'
        return self._end_value()

    def _end_value(self) -> bool:
        self._take(len(self._value_end))
        self._step = self._read_key
        return True


def _as_json(text: str) -> str:
    """Return a value that should be JSON; a text if it is neither JSON nor Python's."""
    value = literal(text.strip())
    return json.dumps(text, ensure_ascii=False) if value is None else value
