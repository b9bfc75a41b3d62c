"""Structured output as callers ask for it: `response_format` and `guided`, parsed to a `Grammar`.

It knows no library that follows a grammar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from reprlib import repr as shortened
from typing import Any

from specserve.errors import BadValue
from specserve.grammar.gbnf import is_gbnf, lark_from_gbnf
from specserve.grammar.json_schema import library_schema
from specserve.grammar.structural_tag import lark_from_structural_tag
from specserve.types import Grammar

MAX_SIZE = 64 * 1024  # characters of an expression or a grammar
MAX_SCHEMA = 256 * 1024  # characters of a JSON schema, without its descriptions
MAX_DEPTH = 64  # levels of objects and lists in a schema
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Line after a client's Lark grammar, where it has precedence over a line of the client's own.

The library computes the bytes that a grammar forces until there is a choice. Lexemes are greedy,
so that after the first byte of `start: A "a"` with `A: /a+/` another one is forced for ever: the
library did not return, and its memory grew by 10 MB a second.
"""
JSON_OBJECT: Mapping[str, object] = {"type": "object"}


def parse_response_format(given: object) -> Grammar | None:
    """Parse OpenAI's `response_format`; None if it allows any text.

    A schema is followed whether `strict` is true or not.
    """
    if given is None:
        return None
    members = _members("response_format", given, ("type", "json_schema", "schema"))
    kind, described = members.get("type"), members.get("json_schema")
    if kind not in ("text", "json_object", "json_schema"):
        raise BadValue(
            f"response_format.type must be text, json_object or json_schema, not {shortened(kind)}",
            param="response_format.type",
        )
    if (described is not None) != (kind == "json_schema"):
        raise BadValue(
            "response_format.json_schema goes with the type json_schema, and that type with it",
            param="response_format.json_schema",
        )
    if "schema" in members and kind != "json_object":
        raise BadValue(
            "response_format.schema goes with the type json_object", param="response_format.schema"
        )
    if kind == "text":
        return None
    anything = members.get("schema", JSON_OBJECT)
    return schema_grammar(
        "response_format", anything if described is None else _openai_schema(described)
    )


def parse_guided(given: object) -> Grammar | None:
    """Parse `guided`: one of an expression, a grammar, a schema and a choice of texts."""
    if given is None:
        return None
    members = {
        name: value
        for name, value in _members("guided", given, tuple(_GUIDES)).items()
        if value is not None
    }
    if len(members) != 1:
        both = f"has {' and '.join(members)}, which exclude one another" if members else "is empty"
        raise BadValue(f"guided {both}; give one of {', '.join(_GUIDES)}", param="guided")
    ((name, value),) = members.items()
    return _GUIDES[name](value)


def schema_grammar(param: str, schema: object) -> Grammar:
    """Return the grammar of a JSON schema.

    Raises BadValue if it is not JSON, or too large or too deep. `validate_grammar` checks its
    keywords.
    """
    if not isinstance(schema, Mapping):
        raise BadValue(
            f"{param} needs a JSON schema, which is an object, not {shortened(schema)}", param=param
        )
    if is_too_deep(schema):
        raise BadValue(
            f"{param} holds a schema nested more than {MAX_DEPTH} levels deep", param=param
        )
    try:
        text = json.dumps(library_schema(schema, param), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadValue(f"{param} holds a schema that is not JSON: {error}", param=param) from error
    return Grammar("json_schema", _check_size(param, text, MAX_SCHEMA))


def is_too_deep(value: object, levels: int = MAX_DEPTH) -> bool:
    """Return True if the value has more than `levels` levels of objects and lists."""
    inner = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, (list, tuple))
        else None
    )
    return inner is not None and (levels == 0 or any(is_too_deep(one, levels - 1) for one in inner))


def _openai_schema(given: object) -> object:
    """Return the schema of OpenAI's `json_schema`; its other members do not affect the grammar."""
    members = _members(
        "response_format.json_schema", given, ("name", "description", "schema", "strict")
    )
    if not isinstance(members.get("name"), str):
        raise BadValue(
            "response_format.json_schema needs a name, a text",
            param="response_format.json_schema.name",
        )
    if not isinstance(members.get("strict"), (bool, type(None))):
        raise BadValue(
            "response_format.json_schema.strict must be true or false",
            param="response_format.json_schema.strict",
        )
    return members.get("schema")


def _members(param: str, given: object, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise BadValue(f"{param} must hold {', '.join(known)}, not {shortened(given)}", param=param)
    for name in given:
        if name not in known:
            raise BadValue(f"{param} knows {', '.join(known)}, not {shortened(name)}", param=param)
    return given


def _check_size(param: str, text: str, most: int = MAX_SIZE) -> str:
    if len(text) > most:
        raise BadValue(f"{param} comes to {len(text)} characters; {most} is the most", param=param)
    return text


def _text(param: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise BadValue(
            f"{param} must be a text, and not empty, rather than {shortened(value)}", param="guided"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadValue(
            f"{param} is not Unicode text: it holds half of a surrogate pair", param="guided"
        ) from error
    return _check_size("guided", value)


def _json(value: object) -> Grammar:
    """Return the grammar of a schema, which may be given as text."""
    return schema_grammar("guided", _parsed("guided.json", value))


def _structural_tag(value: object) -> Grammar:
    """Return the grammar of a structural tag, which vLLM's clients send as text."""
    value = _parsed("guided.structural_tag", value)
    if not isinstance(value, Mapping) or is_too_deep(value):
        raise BadValue(
            f"guided.structural_tag must be an object, at most {MAX_DEPTH} levels deep, not "
            f"{shortened(value)}",
            param="guided",
        )
    return Grammar("lark", _check_size("guided", lark_from_structural_tag(value)) + NO_FORCING)


def _parsed(param: str, value: object) -> object:
    """Return JSON that may be given as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(_text(param, value))
    except (ValueError, RecursionError) as error:
        raise BadValue(f"{param} is a text that is not JSON", param="guided") from error


def _grammar(value: object) -> Grammar:
    """Return the grammar of Lark's notation or of GBNF."""
    text = _text("guided.grammar", value)
    return Grammar("lark", (lark_from_gbnf(text) if is_gbnf(text) else text) + NO_FORCING)


def _choice(value: object) -> Grammar:
    if not isinstance(value, (list, tuple)) or not value:
        raise BadValue(
            f"guided.choice must be a list of texts, and not empty, rather than {shortened(value)}",
            param="guided",
        )
    texts = [json.dumps(_text("guided.choice", one), ensure_ascii=False) for one in value]
    return Grammar("lark", _check_size("guided", f"start: {' | '.join(texts)}"))


_GUIDES: Mapping[str, Callable[[object], Grammar]] = {
    "regex": lambda value: Grammar("regex", _text("guided.regex", value)),
    "grammar": _grammar,
    "json": _json,
    "choice": _choice,
    "structural_tag": _structural_tag,
}
