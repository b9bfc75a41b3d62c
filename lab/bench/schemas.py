"""JSON schemas of rising difficulty, made from a seed, as people use them. Knows no engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LEVELS = 10
WORDS = (
    "name",
    "age",
    "city",
    "tags",
    "price",
    "owner",
    "items",
    "state",
    "kind",
    "count",
    "when",
    "note",
    "id",
    "code",
    "level",
    "parts",
)
VALUES = ("red", "green", "blue", "open", "closed", "low", "high", "draft", "final", "none")
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4")
PATTERNS = (
    "^[A-Z]{2}-[0-9]{3}$",
    "^(yes|no|maybe)$",
    "^#[0-9a-f]{6}$",
    "^v[0-9]{1,2}\\.[0-9]{1,2}$",
)

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SchemaMaker:
    """Maker of the parts of one schema, nested at most `depth` levels deep."""

    rng: random.Random
    level: int

    def value(self, depth: int) -> Schema:
        """Return the schema of a property: simpler where it is deep, and at low levels."""
        kinds = [
            kind
            for kind, (least, nests) in _KINDS.items()
            if self.level >= least and (depth > 0 or not nests)
        ]
        return _MAKERS[self.rng.choice(kinds)](self, depth)

    def record(self, depth: int) -> Schema:
        names = self.rng.sample(WORDS, self.rng.randint(1, 2 + self.level // 3))
        required = names if self.rng.random() < 0.7 else names[: len(names) // 2]
        properties = {name: self.value(depth - 1) for name in names}
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def string(self, depth: int) -> Schema:
        return (
            {"type": "string"}
            if self.rng.random() < 0.2
            else {"type": "string", "minLength": 1, "maxLength": self.rng.randint(3, 12)}
        )

    def integer(self, depth: int) -> Schema:
        low = self.rng.randint(-20, 100)
        return self.rng.choice(
            [
                {"type": "integer", "minimum": low, "maximum": low + self.rng.randint(1, 500)},
                {"type": "integer"},
            ]
        )

    def number(self, depth: int) -> Schema:
        return {"type": "number", "minimum": 0, "exclusiveMaximum": self.rng.randint(1, 50)}

    def enum(self, depth: int) -> Schema:
        return {"enum": self.rng.sample(VALUES, self.rng.randint(2, 5))}

    def boolean(self, depth: int) -> Schema:
        return {"type": self.rng.choice(["boolean", ["boolean", "null"]])}

    def const(self, depth: int) -> Schema:
        return {"const": self.rng.choice([True, None, 7, "fixed", ["a", 1]])}

    def string_with_pattern(self, depth: int) -> Schema:
        return {"type": "string", "pattern": self.rng.choice(PATTERNS)}

    def string_with_format(self, depth: int) -> Schema:
        return {"type": "string", "format": self.rng.choice(FORMATS)}

    def array(self, depth: int) -> Schema:
        low = self.rng.randint(0, 2)
        return {
            "type": "array",
            "items": self.value(depth - 1),
            "minItems": low,
            "maxItems": low + self.rng.randint(0, 2),
        }

    def prefix_items(self, depth: int) -> Schema:
        items = [self.value(0) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.value(depth - 1) for _ in range(2)]}

    def one_of(self, depth: int) -> Schema:
        """Return alternatives of which a value fits only one; the library requires that."""
        return {"oneOf": [self.string(0), self.integer(0), {"type": "null"}]}

    def tree(self, depth: int) -> Schema:
        return {"$ref": "#/$defs/tree"}

    def schema(self) -> Schema:
        schema = self.record(1 + self.level // 3)
        if "#/$defs/tree" in str(schema):
            children = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}
            tree = {
                "type": "object",
                "properties": {"value": self.enum(0), "children": children},
                "required": ["value"],
            }
            schema["$defs"] = {"tree": tree | {"additionalProperties": False}}
        return schema


# The first level that has each kind, and whether the kind nests.
_KINDS: Mapping[str, tuple[int, bool]] = {
    "string": (0, False),
    "integer": (0, False),
    "enum": (0, False),
    "boolean": (1, False),
    "number": (2, False),
    "const": (2, False),
    "array": (2, True),
    "record": (3, True),
    "string_with_pattern": (4, False),
    "prefix_items": (5, True),
    "any_of": (5, True),
    "string_with_format": (6, False),
    "one_of": (7, False),
    "tree": (8, False),
}
_MAKERS: Mapping[str, Callable[[SchemaMaker, int], Schema]] = {
    name: getattr(SchemaMaker, name) for name in _KINDS
}


def make_schema(number: int, *, seed: int = 0) -> Schema:
    """Return the schema of that number and seed; its level is number % LEVELS."""
    return SchemaMaker(random.Random(f"{seed}/{number}"), number % LEVELS).schema()
