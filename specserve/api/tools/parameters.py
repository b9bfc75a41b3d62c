"""Split the JSON schema of a function's arguments into parameters.

For formats that write arguments one by one instead of as one JSON object. Writes no grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from specserve.errors import BadValue

VALUE_END = "\n</parameter>"
"""End of a value that is written as text."""

_KEY = re.compile(r"[A-Za-z0-9_.$-]+")
_FOREIGN_REFERENCE = re.compile(r'"\$ref": "(?!#/(\$defs|definitions)/)')
_SHARED = ("$defs", "definitions", "x-guidance")  # keywords that hold for each parameter's schema
_NEUTRAL = ("title", "description", "default", "examples", "deprecated", "$comment", "$schema")
_OBJECT = {"type", "properties", "required", "additionalProperties", *_SHARED, *_NEUTRAL}
_TEXT = {"type", "minLength", "maxLength", *_SHARED, *_NEUTRAL}
_CHOICE = {"type", "enum", *_SHARED, *_NEUTRAL}
_NULL: Mapping[str, object] = {"type": "null"}


class ParameterKind(Enum):
    """How a value is written where texts need no quotes."""

    TEXT = auto()  # as it stands
    NULLABLE_TEXT = auto()  # as it stands, and `null` is null
    JSON = auto()


FunctionKinds = Mapping[str, Mapping[str, ParameterKind]]
"""Kinds of parameters, by the names of functions and parameters."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a function."""

    name: str
    schema: Mapping[str, object]
    kind: ParameterKind
    text: Mapping[str, object] | None  # the schema of a value that is written as it stands
    is_required: bool

    @property
    def json_grammar(self) -> str:
        return f"%json {json.dumps(self.schema)}"

    @property
    def admits_null(self) -> bool:
        return _NULL in _alternatives(self.schema)

    @property
    def is_boolean(self) -> bool:
        return self.schema.get("type") == "boolean" and not {"enum", "const"} & {*self.schema}


def parse_parameters(text: str) -> tuple[Parameter, ...]:
    """Return the parameters of an object's schema, in their order.

    Members that the schema only admits, without naming them, are no parameters. Raises BadValue
    for a schema that says more of the object than its members.
    """
    schema = json.loads(text)
    if more := sorted({*schema} - _OBJECT):
        raise BadValue(f"this model writes arguments one by one, which excludes {more[0]}")
    if _FOREIGN_REFERENCE.search(json.dumps(schema)):
        raise BadValue("this model writes arguments one by one; a $ref must lie in #/$defs/")
    shared = {key: schema[key] for key in _SHARED if key in schema}
    required, extra = schema.get("required", []), schema.get("additionalProperties", {})
    members = dict.fromkeys(required, extra) | schema.get("properties", {})
    names = [*schema.get("properties", {})]
    names += [name for name in required if name not in names]
    for name in names:
        if not _KEY.fullmatch(name):
            raise BadValue(f"this model's format has no place for a parameter named {name[:64]!r}")
    return tuple(
        _parameter(name, members[name], shared, is_required=name in required) for name in names
    )


def _parameter(
    name: str, schema: object, shared: Mapping[str, object], *, is_required: bool
) -> Parameter:
    if schema is False:
        raise BadValue(f"no value is valid for the parameter {name!r}")
    own = {**(schema if isinstance(schema, dict) else {}), **shared}
    alternatives = _alternatives(own)
    others = [_resolve(one, shared) for one in alternatives if one != _NULL]
    text = others[0] if len(others) == 1 and _is_text(others[0]) else None
    kind = (
        ParameterKind.JSON
        if text is None
        else ParameterKind.TEXT
        if _NULL not in alternatives
        else ParameterKind.NULLABLE_TEXT
    )
    return Parameter(name, own, kind, text, is_required)


def _alternatives(schema: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Return the schemas of which one must hold, with the type null as one of its own."""
    for keyword in ("anyOf", "oneOf"):
        given = schema.get(keyword)
        if isinstance(given, list) and not {*schema} - {keyword, *_SHARED, *_NEUTRAL}:
            return [one if isinstance(one, dict) else {} for one in given]
    types = schema.get("type")
    if isinstance(types, list):
        return [_NULL if one == "null" else {**schema, "type": one} for one in types]
    return [_NULL if types == "null" else schema]


def _resolve(
    schema: Mapping[str, object], shared: Mapping[str, object], levels: int = 8
) -> Mapping[str, object]:
    """Return the definition that a schema refers to, if it does nothing else."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not levels or {*schema} - {"$ref", *_SHARED, *_NEUTRAL}:
        return schema
    _, place, name = reference.split("/", 2)
    definitions = shared.get(place)
    found = definitions.get(name) if isinstance(definitions, dict) else None
    return _resolve(found, shared, levels - 1) if isinstance(found, dict) else schema


def _is_text(schema: Mapping[str, object]) -> bool:
    """Return True for a string without a form of its own, which quotes would have to show."""
    if schema.get("type", "string" if "enum" in schema else None) != "string":
        return False
    choices = schema.get("enum")
    if not isinstance(choices, list):
        return not {*schema} - _TEXT
    return not {*schema} - _CHOICE and all(
        isinstance(one, str) and VALUE_END not in one for one in choices
    )
