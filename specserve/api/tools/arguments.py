"""The styles in which formats write a call's arguments. Knows no formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum, auto
from typing import Protocol

from specserve.api.tools.json_end import JsonEndFinder
from specserve.api.tools.keywords import KeywordsReader
from specserve.api.tools.parameters import VALUE_END, ParameterKind
from specserve.api.tools.tags import TagsReader


class ArgumentStyle(Enum):
    """How arguments are written."""

    JSON = auto()  # one object
    TAGS = auto()  # Qwen3-Coder's: a pair of tags around each value
    KEYWORDS = auto()  # Python's: key=value, with commas between them


class ArgumentsReader(Protocol):
    """A reader of the arguments of one call."""

    has_ended: bool

    def read(self, pending: str) -> tuple[str, str]:
        """Return the JSON of what can be read by now, and the text that is not read yet.

        Raises MalformedArguments if the text cannot become arguments, before it returns any of it.
        """
        ...


def new_reader(style: ArgumentStyle, kinds: Mapping[str, ParameterKind]) -> ArgumentsReader:
    """Return a reader; `kinds` has the kinds of the function's parameters."""
    if style is ArgumentStyle.TAGS:
        return TagsReader(kinds)
    return JsonReader() if style is ArgumentStyle.JSON else KeywordsReader()


class JsonReader:
    """Reader of an object in JSON, which is passed on."""

    def __init__(self) -> None:
        self.has_ended = False
        self._end = JsonEndFinder()

    def read(self, pending: str) -> tuple[str, str]:
        end = self._end.find(pending)
        self.has_ended = end is not None
        return (pending, "") if end is None else (pending[:end], pending[end:])


def render_arguments(style: ArgumentStyle, arguments: str) -> str:
    """Return arguments, given in JSON, in this style; what is no object stays as it is."""
    try:
        members = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if style is ArgumentStyle.JSON or not isinstance(members, dict):
        return arguments
    if style is ArgumentStyle.KEYWORDS:
        return ", ".join(f"{key}={_python(value)}" for key, value in members.items())
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in members.items()
    }
    return "".join(f"<parameter={key}>\n{text}{VALUE_END}\n" for key, text in texts.items())


def _python(value: object) -> str:
    """Return JSON with Python's own words where they stand alone."""
    if value is None or isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
