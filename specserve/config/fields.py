"""How a key is declared and parsed: a default, a rule for its values, and errors with a remedy.

The sections of the config and the parameters of a request are declared with it. It knows no keys.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from numbers import Integral, Real
from typing import Any, TypeVar

from specserve.errors import ConfigError

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # it is part of names of files and sockets


@dataclass(frozen=True, slots=True)
class FieldRule:
    """Values that a key accepts, in words and as a function.

    `read` takes the value and the key, returns the parsed value, and raises ValueError for anything
    else. It raises ConfigError itself where it has a better message than `expects`.
    """

    expects: str
    read: Callable[[object, str], Any]
    keys: type[Any] | None = None
    """The dataclass whose fields are the keys of a section; None for a plain value."""


def setting(default: T, rule: FieldRule) -> T:
    """Declare a key, to be used like `dataclasses.field`.

    A value of null in the config is the same as leaving the key out.
    """
    if isinstance(default, dict):
        made: T = field(default_factory=lambda: default, metadata={"rule": rule})
    else:
        made = field(default=default, metadata={"rule": rule})
    return made


def subsection(kind: type[T], *, needs: str | None = None) -> T:
    """Declare a section as a key of the section above. Its keys may need one, as in `section`."""
    made: T = field(default_factory=kind, metadata={"rule": section(kind, needs=needs)})
    return made


def choice(*names: str) -> FieldRule:
    def read(value: object, key: str) -> str:
        if isinstance(value, str) and value in names:
            return value
        near = difflib.get_close_matches(str(value), names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key} must be one of {', '.join(names)}, not {value!r}{hint}")

    return FieldRule("one of " + ", ".join(names), read)


def integer(low: int, high: int | None = None) -> FieldRule:
    """Accept whole numbers of any integral type, numpy's too, and return them as int."""

    def read(value: object, key: str) -> int:
        if isinstance(value, Integral) and not isinstance(value, bool):
            whole = int(value)
            if low <= whole and (high is None or whole <= high):
                return whole
        raise ValueError

    upper = " or more" if high is None else f" to {high}"
    return FieldRule(f"a whole number {'of' if high is None else 'from'} {low}{upper}", read)


def number(low: float, high: float, *, above: bool = False) -> FieldRule:
    """Accept numbers from `low` to `high`, and return them as float.

    With `above`, `low` itself is invalid. NaN is in no range.
    """

    def read(value: object, key: str) -> float:
        real: Any = value
        if (
            isinstance(value, Real)
            and not isinstance(value, bool)
            and low <= real <= high
            and not (above and real == low)
        ):
            return float(real)
        raise ValueError

    return FieldRule(
        f"a number above {low:g} and up to {high:g}"
        if above
        else f"a number from {low:g} to {high:g}",
        read,
    )


def boolean() -> FieldRule:
    def read(value: object, key: str) -> bool:
        if isinstance(value, bool):
            return value
        raise ValueError

    return FieldRule("true or false", read)


def text(*, empty: bool = False) -> FieldRule:
    def read(value: object, key: str) -> str:
        if isinstance(value, str) and (value or empty):
            return value
        raise ValueError

    return FieldRule("text" if empty else "text that is not empty", read)


def labels() -> FieldRule:
    def read(value: object, key: str) -> dict[str, str]:
        if isinstance(value, Mapping) and all(
            isinstance(part, str) for pair in value.items() for part in pair
        ):
            return dict(value)
        raise ValueError

    return FieldRule("a mapping of text to text", read)


def none_as(word: str, rule: FieldRule) -> FieldRule:
    """Accept `word` as the spelling of None, and otherwise what `rule` accepts."""
    return FieldRule(
        f"{word}, or {rule.expects}",
        lambda value, key: None if value == word else rule.read(value, key),
    )


def list_of(rule: FieldRule) -> FieldRule:
    def read(value: object, key: str) -> tuple[Any, ...]:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(read_value(rule, item, f"{key}[{i}]") for i, item in enumerate(value))
        raise ValueError

    return FieldRule("a list", read)


def section(kind: type[Any], *, needs: str | None = None) -> FieldRule:
    """Accept a group of the keys of `kind`, none of which is given without the one it `needs`.

    A null there is enough, since a config that was written out has all its keys.
    """

    def read(value: object, key: str) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError
        made = read_section(kind, value, key)
        given = [name for name, inner in value.items() if inner is not None]
        if needs is not None and given and needs not in value:
            raise ConfigError(
                f"{key}.{given[0]} is given without {key}.{needs}; "
                f"give it a {key}.{needs}, or leave {key} out"
            )
        return made

    return FieldRule("a group of keys", read, keys=kind)


def read_value(rule: FieldRule, value: object, key: str) -> Any:
    """Return the value as the rule parses it, or raise ConfigError with the key and the remedy."""
    try:
        return rule.read(value, key)
    except ValueError:
        raise ConfigError(f"{key} must be {rule.expects}, not {value!r}") from None


def read_section(
    kind: type[T], given: Mapping[Any, object], path: str = "", *, root: type[Any] | None = None
) -> T:
    """Return an instance of `kind` made from the given keys.

    Raises ConfigError for the first key that is unknown or has an invalid value.
    """
    known = {key.name: key for key in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for name, value in given.items():
        full = f"{path}.{name}" if path else str(name)
        if name not in known:
            raise ConfigError(f"unknown key {full}; {_hint(str(name), path, known, root or kind)}")
        if value is not None:
            values[name] = read_value(rule_of(known[name]), value, full)
    return kind(**values)


def rule_of(key: Field[Any]) -> FieldRule:
    assert key.default is not MISSING or key.default_factory is not MISSING, (
        "every key has a default"
    )
    rule = key.metadata["rule"]
    assert isinstance(rule, FieldRule)
    return rule


def _hint(name: str, path: str, known: Mapping[str, Field[Any]], root: type[Any]) -> str:
    """Suggest the nearest key of this section, else the nearest one below it, else list all."""
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
    """Yield every dotted key, the sections included."""
    for key in fields(kind):
        yield prefix + key.name
        inner = rule_of(key).keys
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{key.name}.")
