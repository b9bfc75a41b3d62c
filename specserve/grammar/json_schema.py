"""JSON schemas in the words of the grammar library, as far as they say exactly the same.

It knows no library. A `oneOf` whose branches exclude one another is an `anyOf`; the library finds
that out for itself where neither references nor bounds matter. The format `iri` is a pattern. What
describes a value without binding it is left out, and so are formats that JSON Schema does not know
and a `propertyNames` that any name obeys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specserve.errors import BadValue
from specserve.grammar.exclusion import Exclusion, Schema
from specserve.grammar.iri import IRI

_SCHEMAS = {"additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"}
_SCHEMAS |= {"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
_MAPS = {"$defs", "definitions", "properties", "patternProperties", "dependentSchemas"}
_NOTES = {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title"}
_NOTES |= {"writeOnly"}
_PATTERNS = {"iri": IRI}
_FORMATS = {"date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname"}
_FORMATS |= {"ipv4", "ipv6", "iri-reference", "json-pointer", "regex", "relative-json-pointer"}
_FORMATS |= {"time", "uri", "uri-reference", "uri-template", "uuid"}
"""Formats that JSON Schema 2020-12 defines. Any other describes a value and binds nothing."""
_ANY_NAMES: tuple[object, ...] = (True, {}, {"type": "string"})
"""Values of propertyNames that every name obeys. Schemas made by zod have the last one in maps."""
MAX_MEMBERS = 2_000
"""Members of one object. The library's work rises by their square: 3 s for 6,000."""


def library_schema(schema: Schema, param: str) -> Schema:
    """Return a schema in words that the library knows.

    Raises BadValue for an object with too many members.
    """
    if (most := _most_members(schema)) > MAX_MEMBERS:
        raise BadValue(
            f"{param} holds a schema with {most} properties of one object; "
            f"{MAX_MEMBERS} are the most",
            param=param,
        )
    if _refers_to_moved(schema) or any(map(_has_base, schema.values())):
        return schema
    rewritten: Schema = _rewritten(schema, Exclusion(schema))
    return rewritten


def _most_members(schema: object) -> int:
    if isinstance(schema, Mapping):
        own, inner = schema.get("properties"), map(_most_members, schema.values())
        return max([len(own) if isinstance(own, Mapping) else 0, *inner])
    return max(map(_most_members, schema), default=0) if isinstance(schema, (list, tuple)) else 0


def _refers_to_moved(schema: object) -> bool:
    """Return True if a reference passes through what rewriting moves or leaves out."""
    if isinstance(schema, Mapping):
        reference = schema.get("$ref")
        moved = {"oneOf", "propertyNames", *_NOTES}
        if isinstance(reference, str) and {*reference.split("/")} & moved:
            return True
        return any(map(_refers_to_moved, schema.values()))
    return isinstance(schema, (list, tuple)) and any(map(_refers_to_moved, schema))


def _has_base(schema: object) -> bool:
    """Return True if references in a part of the schema are relative to that part."""
    if isinstance(schema, Mapping):
        return isinstance(schema.get("$id"), str) or any(map(_has_base, schema.values()))
    return isinstance(schema, (list, tuple)) and any(map(_has_base, schema))


def _rewritten(schema: Any, exclusion: Exclusion) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = {key: value for key, value in schema.items() if key not in _NOTES}
    for key, value in found.items():
        if key in _MAPS and isinstance(value, Mapping):
            found[key] = {name: _rewritten(one, exclusion) for name, one in value.items()}
        elif key in _LISTS and isinstance(value, (list, tuple)):
            found[key] = [_rewritten(one, exclusion) for one in value]
        elif key in _SCHEMAS:
            found[key] = _rewritten(value, exclusion)
    if isinstance(one_of := schema.get("oneOf"), list) and exclusion.holds_among(one_of):
        _add(found, "anyOf", found.pop("oneOf"))
    if found.get("propertyNames") in _ANY_NAMES:
        del found["propertyNames"]
    if isinstance(name := schema.get("format"), str) and name not in _FORMATS:
        del found["format"]
        if name in _PATTERNS:
            _add(found, "pattern", _PATTERNS[name])
    return found


def _add(schema: dict[str, Any], keyword: str, value: object) -> None:
    """Add a keyword, in `allOf` where the schema has it."""
    if keyword not in schema:
        schema[keyword] = value
    else:
        schema["allOf"] = [*schema.get("allOf", []), {keyword: value}]
