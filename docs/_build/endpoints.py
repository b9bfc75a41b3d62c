"""Reference page of the HTTP interface: paths, parameters and errors.

Made from the app's OpenAPI description, the checks of `Sampling` and the table of errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from docs._build.table import code, table
from specserve.api import chat_schema, schema
from specserve.api.app import build
from specserve.api.dialects import SERVERS, ForeignParameter
from specserve.api.messages import body as messages_body
from specserve.api.model_directory import ModelDirectory
from specserve.api.refusal import (
    BAD_KEY,
    CLIENT_CLOSED_REQUEST,
    ERROR_KINDS,
    INTERNAL,
    STATUS_KINDS,
    ErrorKind,
)
from specserve.api.response_items import body as response_body
from specserve.api.strict_model import StrictModel
from specserve.config.tree import Config
from specserve.errors import BadValue
from specserve.metrics import Registry
from specserve.sampling_params import Sampling

INTRODUCTION = """# HTTP paths and parameters

Made from the server's OpenAPI description (`GET /openapi.json`) when the site is built.
[HTTP](../guides/http.md) has examples of requests and responses.
"""
Schema = Mapping[str, Any]


def page() -> str:
    """Return the paths in the order of the app, the shapes of bodies, and the errors."""
    description = openapi()
    shapes: Mapping[str, Schema] = description["components"]["schemas"]
    bodies = {name for _, _, operation in _operations(description) if (name := _body(operation))}
    parts = [
        INTRODUCTION,
        *(
            _path(method, path, operation, shapes)
            for method, path, operation in _operations(description)
        ),
    ]
    inner = [
        name
        for name, shape in shapes.items()
        if "properties" in shape and name not in bodies and issubclass(_model(name), StrictModel)
    ]
    parts += [
        "## Shapes inside bodies\n",
        *(f"### {name}\n\n{_fields(name, shapes[name])}" for name in sorted(inner)),
    ]
    return "\n".join([*parts, _dialects(), _errors()])


def openapi() -> Mapping[str, Any]:
    """Return the description of an app whose model is not open: it needs none."""
    app = build(ModelDirectory(["demo"]), Config(), Registry(), None)
    description: Mapping[str, Any] = app.openapi()
    return description


def _operations(description: Mapping[str, Any]) -> Iterator[tuple[str, str, Schema]]:
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def _model(name: str) -> type[StrictModel]:
    """Return the class of a shape."""
    modules = (schema, chat_schema, response_body, messages_body)
    found: type[StrictModel] = next(getattr(one, name) for one in modules if hasattr(one, name))
    return found


def _body(operation: Schema) -> str | None:
    content = (
        operation.get("requestBody", {})
        .get("content", {})
        .get("application/json", {})
        .get("schema")
    )
    return None if content is None else _name(content)


def _path(method: str, path: str, operation: Schema, shapes: Mapping[str, Schema]) -> str:
    body = _body(operation)
    heading = f"## {method} {path}\n\n{operation.get('description', '')}\n"
    return heading + (f"\n{_fields(body, shapes[body])}" if body else "")


def _fields(name: str, shape: Schema) -> str:
    """Return the parameters, required ones first, then those accepted for compatibility."""
    required = shape.get("required", ())
    names = sorted(shape["properties"], key=lambda one: one not in required)
    given = {one: shape["properties"][one] for one in names}
    rows = [
        (code(one), _kind(kind), _limits(name, one, kind), _meaning(kind, one in required))
        for one, kind in given.items()
    ]
    return table(("parameter", "type", "accepts, by default", "meaning"), rows) + _unsupported(name)


def _meaning(parameter: Schema, required: bool) -> str:
    return " ".join([*(["**Required.**"] if required else []), parameter.get("description", "")])


def _unsupported(name: str) -> str:
    """Return the protocol's parameters that are refused unless their value changes nothing."""
    known: Mapping[str, tuple[object, ...]] = _model(name).UNSUPPORTED
    if not known:
        return ""
    taken = ", ".join(
        f"{code(one)} ({', '.join(['null', *map(repr, values)])})"
        for one, values in sorted(known.items())
    )
    about = "Parameters of the protocol that are refused, except for values that change nothing"
    return f"\n{about}: {taken}.\n"


def _dialects() -> str:
    """Return the parameters of other servers, and what is taken of them."""
    rows = [
        (server, code(name), _taken(parameter), parameter.instead)
        for server, names in SERVERS.items()
        for name, parameter in names.items()
    ]
    about = (
        "Parameters of other servers that this one has not. Values that change nothing are taken, "
        "others refused with 400."
    )
    head = ("of", "parameter", "values that change nothing", "otherwise")
    return f"## Parameters of other servers\n\n{about}\n\n" + table(head, rows)


def _taken(parameter: ForeignParameter) -> str:
    kinds = [_PYTHON_KINDS[kind] for kind in parameter.neutral_types if kind is not float]
    values = [code(json.dumps(value)) for value in parameter.neutral]
    return ", ".join([code("null"), *values, *kinds])


_PYTHON_KINDS = {int: "any number", str: "any text", list: "any list"}


def _kind(given: Schema) -> str:
    """Return the type in words. Null is left out: it means that the parameter is not given."""
    if "$ref" in given:
        return _named(_name(given))
    several = given.get("anyOf", given.get("oneOf"))
    if several is not None:
        kinds = dict.fromkeys(_kind(one) for one in several if one.get("type") != "null")
        return " or ".join(kinds)
    if "enum" in given or "const" in given:
        return ", ".join(code(one) for one in given.get("enum", [given.get("const")]))
    if "maxLength" in given:
        return f"text of up to {given['maxLength']} characters"
    if given.get("type") == "array":
        return f"list of {_kind(given['items'])}"
    if given.get("type") == "object":
        values = given.get("additionalProperties", True)
        return "object" if isinstance(values, bool) else f"object of {_kind(values)}"
    return _WORDS[given["type"]]


_WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
}
_ALIASES = {
    "Ids": "list of whole numbers",
    "Texts": "list of texts",
    "Prompts": "list of texts or lists of ids",
}


def _named(name: str) -> str:
    return (
        _ALIASES.get(name) or f"[{name}](#{name.lower()})"
        if name not in _LISTS
        else f"list of [{_LISTS[name]}](#{_LISTS[name].lower()})"
    )


_LISTS = {
    "MessageBlocks": "MessageBlock",
    "MessageTools": "MessageTool",
    "MessageTurns": "MessageTurn",
    "Messages": "Message",
    "Parts": "TextPart",
    "ResponseInput": "ResponseItem",
    "ResponseTexts": "ResponseText",
    "ResponseTools": "ResponseTool",
    "NamedTools": "NamedTool",
    "ToolCalls": "ToolCall",
    "Tools": "ToolBody",
}


def _name(given: Schema) -> str:
    return str(given["$ref"]).rpartition("/")[2]


def _limits(shape: str, name: str, given: Schema) -> str:
    """Return the range from the message of `Sampling`, and the default."""
    sampled = {field.name: field.default for field in fields(Sampling)}
    if (
        not issubclass(_model(shape), schema.GenerationBody)
        or name not in sampled
        or name == "speculation"
    ):
        return ""
    default = DEFAULTS.get((shape, name), sampled[name])
    shown = "" if default in (None, (), False) else str(default)
    return "; ".join(
        part
        for part in ("" if _kind(given) == _WORDS["boolean"] else _accepted(name), shown)
        if part
    )


DEFAULTS = {
    ("ChatBody", "max_tokens"): "what the context has room for"
}  # by completions, `Sampling`'s own


def _accepted(name: str) -> str:
    try:
        Sampling(**{name: object()})  # type: ignore[arg-type]
    except BadValue as refusal:
        found = re.search(r" must be (?:a whole number,? |a number,? |)(.*), not <", str(refusal))
        return "" if found is None else found[1]
    return ""


def _errors() -> str:
    kinds = dict.fromkeys([*ERROR_KINDS.values(), BAD_KEY, *STATUS_KINDS.values(), INTERNAL])
    rows = [
        (str(kind.status), code(kind.type), _code(kind), "`Retry-After`" if kind.retry else "")
        for kind in sorted(kinds, key=_order)
    ]
    return (
        '## Errors\n\nEvery error has the form `{"error": {"message", "type", "param", "code"}}`; '
        "`param` names the invalid parameter, if there is one. In a stream that has begun, it is "
        "sent as an event. `/v1/messages` has Anthropic's form, its types, and 529 instead of 429 "
        "`overloaded`. Metrics and logs count a client that disconnected as "
        f"{CLIENT_CLOSED_REQUEST}.\n\n"
    ) + table(("status", "type", "code", "with"), rows)


def _code(kind: ErrorKind) -> str:
    return code(kind.code) if kind.code else ""


def _order(kind: ErrorKind) -> tuple[int, str]:
    return kind.status, kind.code or ""
