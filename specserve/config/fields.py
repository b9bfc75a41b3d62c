"""How a key of the configuration is declared and read: a default, a rule for its values, and refusals that name key, value and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from specserve.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rule:
    """What a key accepts. `read` raises ValueError for anything else, and says ConfigError itself when it knows better."""

    expects: str
    read: Callable[[object, str], Any]  # (value, key)
    keys: type[Any] | None = None  # a section's own keys


def setting(default: T, rule: Rule) -> T:
    """A key: to be used like `dataclasses.field`. A value of null is the same as leaving the key out."""
    if isinstance(default, dict):
        made: T = field(default_factory=lambda: default, metadata={"rule": rule})
    else:
        made = field(default=default, metadata={"rule": rule})
    return made


def group(kind: type[T]) -> T:
    """A section as a key of the section above."""
    made: T = field(default_factory=kind, metadata={"rule": section(kind)})
    return made


def choice(*names: str) -> Rule:
    def read(value: object, key: str) -> str:
        if isinstance(value, str) and value in names:
            return value
        near = difflib.get_close_matches(str(value), names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key} must be one of {', '.join(names)}, not {value!r}{hint}")

    return Rule("one of " + ", ".join(names), read)


def whole(low: int, high: int) -> Rule:
    def read(value: object, key: str) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise ValueError

    return Rule(f"a whole number from {low} to {high}", read)


def number(low: float, high: float, *, above: bool = False) -> Rule:
    """From `low` to `high`; with `above`, `low` itself is out."""

    def read(value: object, key: str) -> float:
        if (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and low <= value <= high
            and not (above and value == low)
        ):
            return float(value)
        raise ValueError

    return Rule(
        f"a number above {low:g} and up to {high:g}"
        if above
        else f"a number from {low:g} to {high:g}",
        read,
    )


def boolean() -> Rule:
    def read(value: object, key: str) -> bool:
        if isinstance(value, bool):
            return value
        raise ValueError

    return Rule("true or false", read)


def text(*, empty: bool = False) -> Rule:
    def read(value: object, key: str) -> str:
        if isinstance(value, str) and (value or empty):
            return value
        raise ValueError

    return Rule("text" if empty else "text that is not empty", read)


def labels() -> Rule:
    def read(value: object, key: str) -> dict[str, str]:
        if isinstance(value, Mapping) and all(
            isinstance(part, str) for pair in value.items() for part in pair
        ):
            return dict(value)
        raise ValueError

    return Rule("a mapping of text to text", read)


def unset_as(word: str, rule: Rule) -> Rule:
    """`word` is what people write for None."""
    return Rule(
        f"{word}, or {rule.expects}",
        lambda value, key: None if value == word else rule.read(value, key),
    )


def items(rule: Rule) -> Rule:
    def read(value: object, key: str) -> tuple[Any, ...]:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(read_value(rule, item, f"{key}[{i}]") for i, item in enumerate(value))
        raise ValueError

    return Rule("a list", read)


def section(kind: type[Any]) -> Rule:
    def read(value: object, key: str) -> Any:
        if isinstance(value, Mapping):
            return read_section(kind, value, key)
        raise ValueError

    return Rule("a group of keys", read, keys=kind)


def read_value(rule: Rule, value: object, key: str) -> Any:
    try:
        return rule.read(value, key)
    except ValueError:
        raise ConfigError(f"{key} must be {rule.expects}, not {value!r}") from None


def read_section(
    kind: type[T], given: Mapping[Any, object], path: str = "", *, root: type[Any] | None = None
) -> T:
    """An instance of `kind` from the keys given; raises ConfigError for the first that it does not know or cannot accept."""
    known = {key.name: key for key in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for name, value in given.items():
        full = f"{path}.{name}" if path else str(name)
        if name not in known:
            raise ConfigError(f"unknown key {full}; {_hint(str(name), path, known, root or kind)}")
        if value is not None:
            values[name] = read_value(_rule(known[name]), value, full)
    return kind(**values)


def _rule(key: Field[Any]) -> Rule:
    assert key.default is not MISSING or key.default_factory is not MISSING, (
        "every key has a default"
    )
    rule = key.metadata["rule"]
    assert isinstance(rule, Rule)
    return rule


def _hint(name: str, path: str, known: Mapping[str, Field[Any]], root: type[Any]) -> str:
    """The nearest key of the same section, else the nearest anywhere below, else all that there is."""
    prefix = f"{path}." if path else ""
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    below = {full.rpartition(".")[2]: full for full in all_keys(root, prefix)}
    near = difflib.get_close_matches(name, below, n=1)
    if near:
        return f"did you mean {below[near[0]]}?"
    return f"known here: {', '.join(known)}"


def all_keys(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """Dotted, with those of the sections themselves."""
    for key in fields(kind):
        yield prefix + key.name
        inner = _rule(key).keys
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{key.name}.")
