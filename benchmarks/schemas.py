"""JSON schemas of rising difficulty, made from a seed: what people ask of structured output, in all its nesting. Knows no engine."""

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
class Maker:
    """Makes parts of one schema, `depth` levels of nesting at most."""

    rng: random.Random
    level: int

    def value(self, depth: int) -> Schema:
        """Whatever a property may hold: plainer where it is deep, or the schema easy."""
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

    def text(self, depth: int) -> Schema:
        return (
            {"type": "string"}
            if self.rng.random() < 0.2
            else {"type": "string", "minLength": 1, "maxLength": self.rng.randint(3, 12)}
        )

    def whole(self, depth: int) -> Schema:
        low = self.rng.randint(-20, 100)
        return self.rng.choice(
            [
                {"type": "integer", "minimum": low, "maximum": low + self.rng.randint(1, 500)},
                {"type": "integer"},
            ]
        )

    def number(self, depth: int) -> Schema:
        return {"type": "number", "minimum": 0, "exclusiveMaximum": self.rng.randint(1, 50)}

    def chosen(self, depth: int) -> Schema:
        return {"enum": self.rng.sample(VALUES, self.rng.randint(2, 5))}

    def flag(self, depth: int) -> Schema:
        return {"type": self.rng.choice(["boolean", ["boolean", "null"]])}

    def fixed(self, depth: int) -> Schema:
        return {"const": self.rng.choice([True, None, 7, "fixed", ["a", 1]])}

    def patterned(self, depth: int) -> Schema:
        return {"type": "string", "pattern": self.rng.choice(PATTERNS)}

    def formatted(self, depth: int) -> Schema:
        return {"type": "string", "format": self.rng.choice(FORMATS)}

    def listed(self, depth: int) -> Schema:
        low = self.rng.randint(0, 2)
        return {
            "type": "array",
            "items": self.value(depth - 1),
            "minItems": low,
            "maxItems": low + self.rng.randint(0, 2),
        }

    def row(self, depth: int) -> Schema:
        items = [self.value(0) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}

    def either(self, depth: int) -> Schema:
        return {"anyOf": [self.value(depth - 1) for _ in range(2)]}

    def one(self, depth: int) -> Schema:
        """Of which no two can be the same: the library asks for that."""
        return {"oneOf": [self.text(0), self.whole(0), {"type": "null"}]}

    def tree(self, depth: int) -> Schema:
        return {"$ref": "#/$defs/tree"}

    def whole_schema(self) -> Schema:
        schema = self.record(1 + self.level // 3)
        if "#/$defs/tree" in str(schema):
            children = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}
            tree = {
                "type": "object",
                "properties": {"value": self.chosen(0), "children": children},
                "required": ["value"],
            }
            schema["$defs"] = {"tree": tree | {"additionalProperties": False}}
        return schema


_KINDS: Mapping[str, tuple[int, bool]] = {  # from which level on, and whether it nests
    "text": (0, False),
    "whole": (0, False),
    "chosen": (0, False),
    "flag": (1, False),
    "number": (2, False),
    "fixed": (2, False),
    "listed": (2, True),
    "record": (3, True),
    "patterned": (4, False),
    "row": (5, True),
    "either": (5, True),
    "formatted": (6, False),
    "one": (7, False),
    "tree": (8, False),
}
_MAKERS: Mapping[str, Callable[[Maker, int], Schema]] = {
    name: getattr(Maker, name) for name in _KINDS
}


def made(number: int, *, seed: int = 0) -> Schema:
    """The schema of that number: the same for the same seed, harder the more often LEVELS goes into it without a rest left over."""
    maker = Maker(random.Random(f"{seed}/{number}"), number % LEVELS)
    return maker.whole_schema()
