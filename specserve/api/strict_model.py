"""Base classes of bodies and of the objects in them: unknown members, and texts that are no texts.

Knows no parameter of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from specserve.api.dialects import DIALECTS, is_neutral
from specserve.errors import BadValue

MAX_NAME = 100  # characters of a name that an error repeats
MAX_NAMES = 16  # names of unknown parameters that a header repeats
NOT_UNICODE = "is not Unicode text: it holds half of a surrogate pair"


Unsupported = Mapping[str, tuple[object, ...]]
"""Names of parameters, and the values of them that change nothing."""


class StrictModel(BaseModel):
    """A model that refuses unknown members.

    Members of OpenAI's API are taken with the default that asks for nothing: `suffix: null` is
    harmless, `suffix: "x"` is not.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    # Names of OpenAI's API, and the values that change nothing; null is always one.
    UNSUPPORTED: ClassVar[Unsupported] = {}
    # Members that clients add to our own answers, and send back with them.
    IGNORED: ClassVar[tuple[str, ...]] = ()
    # True where members that nothing knows are dropped, as in messages.
    IGNORES_UNKNOWN: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        known = cls.names()
        for name in given:
            if name in known or name in cls.IGNORED:
                continue
            if name not in cls.UNSUPPORTED:
                if cls.IGNORES_UNKNOWN:
                    continue
                raise cls.unknown_error(name)
            if given[name] is not None and not is_neutral(given[name], cls.UNSUPPORTED[name]):
                raise BadValue(f"{name} is not supported", param=name)
        return {name: value for name, value in given.items() if name in known}

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of the members, as clients write them."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @classmethod
    def unknown_error(cls, name: str) -> BadValue:
        """Return the error for a member that nothing knows, with the nearest known name."""
        near = cls._members_named(name)
        near += difflib.get_close_matches(name[:MAX_NAME], cls.names(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return BadValue(f"unknown parameter {name[:MAX_NAME]!r}{hint}", param=name[:MAX_NAME])

    def check_given(self, path: str, names: Iterable[str]) -> None:
        """Raise BadValue for a missing member that an object of this `type` needs."""
        for name in names:
            if getattr(self, name) is None:
                param = f"{path}.{name}"
                kind = getattr(self, "type", "")
                raise BadValue(f"{param} is needed in a {kind}", param=param)

    @classmethod
    def _members_named(cls, name: str) -> list[str]:
        """Return where the members of this model have a member of that name."""
        return [
            f"{member}.{name}"
            for member, field in cls.model_fields.items()
            for kind in get_args(field.annotation) or (field.annotation,)
            if isinstance(kind, type) and issubclass(kind, StrictModel) and name in kind.names()
        ]


class Body(StrictModel):
    """A whole body. Its unknown members are kept by name: a setting says what becomes of them."""

    # Checked where they become tokens, and too large for a second look.
    CHECKED_LATER: ClassVar[frozenset[str]] = frozenset({"prompt", "messages", "tokens"})
    _unknown: tuple[str, ...] = PrivateAttr(())

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the members that nothing knows."""
        return self._unknown

    @model_validator(mode="wrap")
    @classmethod
    def keep_unknown(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Take parameters of other servers whose value changes nothing, and keep unknown names."""
        if not isinstance(given, Mapping):
            return handler(given)
        known = cls.names() | set(cls.UNSUPPORTED)
        others = [name for name in given if name not in known]
        for name in others:
            if name in DIALECTS:
                DIALECTS[name].check(name, given[name])
        for name in known & set(given) - cls.CHECKED_LATER:
            if has_half_pair(given[name]):
                raise BadValue(f"{name} {NOT_UNICODE}", param=name)
        body = handler({name: value for name, value in given.items() if name in known})
        body._unknown = tuple(name for name in others if name not in DIALECTS)
        return body


def shown_names(names: Sequence[str]) -> str:
    """Return names of a client as a header takes them; long ones and many are cut."""
    shown = [ascii(name[:MAX_NAME])[1:-1] for name in names[:MAX_NAMES]]
    return ", ".join([*shown, *(["..."] if len(names) > MAX_NAMES else [])])


def has_half_pair(value: object) -> bool:
    """Return True if a text anywhere in the value holds half of a surrogate pair."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            if not one.isascii() and not _is_unicode(one):
                return True
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            waiting += one
    return False


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
