"""JSON schemas that exclude one another: no value satisfies both. Knows nothing of grammars."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

MAX_STEPS = 150_000
"""Steps of one schema's comparisons, of about a microsecond each; 100 branches take 60,000."""
MAX_LEVELS = 16
"""Levels of members and branches that are compared."""
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


class Exclusion:
    """Finds out which schemas no value satisfies at once. Where in doubt, it says no."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._steps = self._level = 0

    def holds_among(self, branches: list[Any]) -> bool:
        """Return True if each branch excludes all others."""
        return all(
            self.excludes(one, other)
            for i, one in enumerate(branches)
            for other in branches[i + 1 :]
        )

    def excludes(self, one: Any, other: Any) -> bool:
        """Return True if no value satisfies both."""
        if self._level == MAX_LEVELS:
            return False
        self._level += 1
        try:
            return self._excludes(one, other)
        finally:
            self._level -= 1

    def _excludes(self, one: Any, other: Any) -> bool:
        mine, theirs = [*self._parts(one)], [*self._parts(other)]
        self._steps += len(mine) * _size(theirs) + len(theirs) * _size(mine)
        if self._steps > MAX_STEPS:
            return False
        if self._splits(mine, other) or self._splits(theirs, one):
            return True
        return all(
            any(_RULES[kind](a, b) for a in mine for b in theirs)
            or (kind == "array" and self._items_exclude(mine, theirs))
            or (kind == "object" and self._members_exclude(mine, theirs))
            for kind in _types(mine) & _types(theirs)
        )

    def _splits(self, parts: list[Schema], other: Any) -> bool:
        """Return True if each branch of one of the parts excludes the other schema."""
        return any(
            isinstance(part.get(key), list) and all(self.excludes(one, other) for one in part[key])
            for part in parts
            for key in ("anyOf", "oneOf")
        )

    def _parts(self, schema: Any) -> Iterator[Schema]:
        """Yield the schemas that all must hold: the given one, and what it refers to."""
        waiting, seen = [schema], set[int]()
        while waiting and self._steps <= MAX_STEPS:
            self._steps += 1
            one = waiting.pop()
            if one is False:
                yield {"enum": []}
            if not isinstance(one, Mapping) or id(one) in seen:
                continue
            seen.add(id(one))
            yield one
            waiting += _list(one, "allOf")
            if isinstance(target := one.get("$ref"), str):
                waiting.append(self._resolve(target))

    def _resolve(self, reference: str) -> Any:
        found: Any = self._root
        if not reference.startswith("#"):
            return True
        for name in reference.removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        return True if found is None else found

    def _items_exclude(self, mine: list[Schema], theirs: list[Schema]) -> bool:
        """Return True if an item that both must have cannot satisfy both."""
        least = max(_least(mine, "minItems"), _least(theirs, "minItems"))
        return any(
            self.excludes(one, other)
            for a in mine
            for b in theirs
            for one, other in _pairs(a, b, least)
        )

    def _members_exclude(self, mine: list[Schema], theirs: list[Schema]) -> bool:
        """Return True if a member that one must have is forbidden by the other, or has no value."""
        required = [
            {name for part in each for name in _list(part, "required")} for each in (mine, theirs)
        ]
        if any(_forbids(part, name) for part in theirs for name in required[0]):
            return True
        if any(_forbids(part, name) for part in mine for name in required[1]):
            return True
        either = required[0] | required[1]
        return any(
            self.excludes(a["properties"][name], b["properties"][name])
            for a in mine
            for b in theirs
            for name in _map(a, "properties")
            if name in either and name in _map(b, "properties")
        )


def _size(parts: list[Schema]) -> int:
    """Return how many things the parts list, and the parts themselves."""
    lists = ("enum", "required", "prefixItems")
    return sum(
        1 + len(_map(part, "properties")) + sum(len(_list(part, name)) for name in lists)
        for part in parts
    )


def _types(parts: list[Schema]) -> frozenset[str]:
    """Return the types that values of all parts may have; integers are numbers."""
    types = _TYPES
    for part in parts:
        if isinstance(given := part.get("type"), (str, list)):
            names = [given] if isinstance(given, str) else given
            types &= {"number" if name == "integer" else str(name) for name in names}
        if (values := _values(part)) is not None:
            types &= {_type_of(value) for value in values}
    return types


def _pairs(one: Schema, other: Schema, most: int) -> list[tuple[Any, Any]]:
    """Return what both say of the same item, for the first items."""
    both = zip(_list(one, "prefixItems"), _list(other, "prefixItems"), strict=False)
    return [*both][:most]


def _forbids(part: Schema, name: str) -> bool:
    if name in _map(part, "properties"):
        return part["properties"][name] is False
    return part.get("additionalProperties") is False and not part.get("patternProperties")


def _differ(one: Schema, other: Schema) -> bool:
    """Return True if both list their values and share none."""
    mine, theirs = _values(one), _values(other)
    if mine is None or theirs is None:
        return False
    return {*map(_key, mine)}.isdisjoint(map(_key, theirs))


def _apart(least: str, most: str) -> Callable[[Schema, Schema], bool]:
    """Return a rule for schemas whose bounds leave no number to both."""

    def rule(one: Schema, other: Schema) -> bool:
        return _differ(one, other) or any(
            _number(a, least, -math.inf) > _number(b, most, math.inf)
            for a, b in ((one, other), (other, one))
        )

    return rule


_RULES: Mapping[str, Callable[[Schema, Schema], bool]] = {
    "null": _differ,
    "boolean": _differ,
    "number": _apart("minimum", "maximum"),
    "string": _apart("minLength", "maxLength"),
    "array": _apart("minItems", "maxItems"),
    "object": _differ,
}


def _values(part: Schema) -> list[Any] | None:
    """Return the values that a schema lists; None if it lists none."""
    if "const" in part:
        return [part["const"]]
    return part["enum"] if isinstance(part.get("enum"), list) else None


def _key(value: Any) -> str:
    """Return a text that equal values share: 1.0 equals 1, and true does not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(k)}:{_key(value[k])}" for k in sorted(value)) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_key, value))}]"
    return json.dumps(value)


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def _least(parts: list[Schema], keyword: str) -> int:
    return max((one for part in parts if isinstance(one := part.get(keyword), int)), default=0)


def _number(part: Schema, keyword: str, otherwise: float) -> float:
    value = part.get(keyword)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else otherwise  # type: ignore[return-value]


def _list(part: Schema, keyword: str) -> list[Any]:
    return value if isinstance(value := part.get(keyword), list) else []


def _map(part: Schema, keyword: str) -> Schema:
    return value if isinstance(value := part.get(keyword), Mapping) else {}
