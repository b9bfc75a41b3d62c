"""Conversion of structural tags, as vLLM and xgrammar have them, to Lark's notation.

Free text may go on until a trigger; a tag that begins with it must follow, with content of its own.
Triggers, beginnings and ends are text, never special tokens. It knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as shortened
from typing import Any

from specserve.errors import BadValue
from specserve.grammar.json_schema import library_schema

PARAM = "guided"
ANY_TEXT = r"/(.|\n)*/"


def lark_from_structural_tag(given: Mapping[str, Any]) -> str:
    """Return the grammar of a structural tag in Lark's notation. Raises BadValue."""
    _members(given, "type", of="structural_tag", optional=("format", "structures", "triggers"))
    if given["type"] != "structural_tag":
        raise _error(f"has the type structural_tag, not {shortened(given['type'])}")
    is_old = given.get("format") is None
    described = _triggered_from_structures(given) if is_old else given["format"]
    writer = _Writer()
    start = writer.expression(described, is_last=True)
    return "\n".join((f"start: {start}", f"TEXT: {ANY_TEXT}", *writer.rules))


def _triggered_from_structures(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the older form, with `structures` and `triggers`, as the newer one."""
    _members(given, "type", "structures", "triggers", of="structural_tag", optional=("format",))
    for one in _list(given["structures"], "structures"):
        _members(one, "begin", "end", of="structures", optional=("schema",))
    tags = [
        {
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one.get("schema") or {}},
            "end": one["end"],
        }
        for one in given["structures"]
    ]
    return {"type": "triggered_tags", "triggers": given["triggers"], "tags": tags}


class _Writer:
    """Rules in Lark's notation, as they are needed by expressions."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    def expression(self, given: object, *, is_last: bool = False) -> str:
        """Return an expression for a format; free text must be the last of all."""
        kind = given.get("type") if isinstance(given, Mapping) else given
        if not isinstance(given, Mapping) or kind not in _FORMATS:
            raise _error(f"knows the formats {', '.join(_FORMATS)}, not {shortened(kind)}")
        return _FORMATS[str(kind)](self, given, is_last)

    def constant(self, given: Mapping[str, Any], is_last: bool) -> str:
        _members(given, "type", "value", of="const_string")
        return _literal(given["value"], "const_string.value")

    def schema(self, given: Mapping[str, Any], is_last: bool) -> str:
        _members(given, "type", "json_schema", of="json_schema", optional=("style",))
        if given.get("style", "json") != "json":
            raise _error("knows the style json of a json_schema only")
        schema = given["json_schema"]
        if not isinstance(schema, (Mapping, bool)):
            raise _error(f"needs a JSON schema, which is an object, not {shortened(schema)}")
        words = library_schema(schema, "guided") if isinstance(schema, Mapping) else {}
        return f"%json {json.dumps(words)}"

    def regex(self, given: Mapping[str, Any], is_last: bool) -> str:
        _members(given, "type", "pattern", of="regex")
        return _pattern(given["pattern"])

    def any_text(self, given: Mapping[str, Any], is_last: bool) -> str:
        _members(given, "type", of="any_text")
        if not is_last:
            raise _error("has any_text where something follows; it stands in a tag or at the end")
        return "TEXT"

    def sequence(self, given: Mapping[str, Any], is_last: bool) -> str:
        _members(given, "type", "elements", of="sequence")
        *before, last = _list(given["elements"], "sequence.elements")
        parts = [self.expression(one) for one in before]
        return f"({' '.join((*parts, self.expression(last, is_last=is_last)))})"

    def choice(self, given: Mapping[str, Any], is_last: bool) -> str:
        _members(given, "type", "elements", of="or")
        elements = _list(given["elements"], "or.elements")
        return f"({' | '.join(self.expression(one, is_last=is_last) for one in elements)})"

    def tag(self, given: Mapping[str, Any], is_last: bool, *, begun: str = "") -> str:
        """Return the expression of a tag, of whose beginning `begun` is written already."""
        _members(given, "begin", "content", "end", of="tag", optional=("type",))
        begin = _literal(_text(given["begin"], "tag.begin").removeprefix(begun), "tag.begin")
        end, content = _literal(given["end"], "tag.end"), given["content"]
        kind = content.get("type") if isinstance(content, Mapping) else None
        if kind not in ("any_text", "regex") or not given["end"]:
            ends = is_last and not given["end"]
            return f"({begin} {self.expression(content, is_last=ends)} {end})"
        # A lexeme takes all that it can, and would take the end with it.
        inside = ANY_TEXT if kind == "any_text" else self.regex(content, is_last)
        return f"({begin} {self._lazy(f'{inside} {end}')})"

    def triggered_tags(self, given: Mapping[str, Any], is_last: bool) -> str:
        _members(
            given,
            *("type", "triggers", "tags"),
            of="triggered_tags",
            optional=("at_least_one", "stop_after_first"),
        )
        waiting = list(_list(given["tags"], "triggered_tags.tags"))
        choices = []
        for trigger in _list(given["triggers"], "triggered_tags.triggers"):
            if not _text(trigger, "triggered_tags.triggers"):
                raise _error("has an empty trigger")
            begun = [tag for tag in waiting if _begin(tag).startswith(trigger)]
            waiting = [tag for tag in waiting if tag not in begun]
            tags = " | ".join(self.tag(tag, False, begun=trigger) for tag in begun)
            lead = self._lazy(f"TEXT {json.dumps(trigger)}")
            choices += [f"{lead} ({tags})"] if begun else []
        if waiting:
            raise _error(f"has a tag that begins with no trigger: {shortened(_begin(waiting[0]))}")
        either, must = " | ".join(choices), _flag(given, "at_least_one")
        if _flag(given, "stop_after_first"):
            return f"({either})" if must or not is_last else f"({either} | TEXT)"
        if not is_last:
            raise _error("has triggered_tags where something follows; they stand at the end")
        return f"(({either}){'+' if must else '*'} TEXT)"

    def tags_with_separator(self, given: Mapping[str, Any], is_last: bool) -> str:
        _members(
            given,
            *("type", "tags", "separator"),
            of="tags_with_separator",
            optional=("at_least_one", "stop_after_first"),
        )
        tags = _list(given["tags"], "tags_with_separator.tags")
        one = f"({' | '.join(self.tag(tag, False) for tag in tags)})"
        between = _literal(given["separator"], "tags_with_separator.separator")
        more = "" if _flag(given, "stop_after_first") else f" ({between} {one})*"
        return f"({one}{more}){'' if _flag(given, 'at_least_one') else '?'}"

    def _lazy(self, expression: str) -> str:
        """Return a rule whose text ends as soon as it can."""
        name = f"lazy_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {expression}")
        return name


_FORMATS: Mapping[str, Callable[[_Writer, Mapping[str, Any], bool], str]] = {
    "const_string": _Writer.constant,
    "json_schema": _Writer.schema,
    "regex": _Writer.regex,
    "any_text": _Writer.any_text,
    "sequence": _Writer.sequence,
    "or": _Writer.choice,
    "tag": _Writer.tag,
    "triggered_tags": _Writer.triggered_tags,
    "tags_with_separator": _Writer.tags_with_separator,
}


def _members(given: object, *needed: str, of: str, optional: Sequence[str] = ()) -> None:
    known = (*needed, *optional)
    if not isinstance(given, Mapping):
        raise _error(f"has {of} that must hold {', '.join(known)}, not {shortened(given)}")
    unknown = [name for name in given if name not in known]
    missing = [name for name in needed if name not in given]
    if unknown or missing:
        what = f"not {shortened(unknown[0])}" if unknown else f"and {missing[0]} is missing"
        raise _error(f"has {of} with {', '.join(known)}, {what}")


def _list(value: object, name: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)) or not value:
        raise _error(f"needs a list in {name}, and not an empty one, not {shortened(value)}")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _error(f"needs a text in {name}, not {shortened(value)}")
    return value


def _begin(tag: object) -> str:
    return _text(tag.get("begin") if isinstance(tag, Mapping) else tag, "tag.begin")


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name)
    if not isinstance(value, (bool, type(None))):
        raise _error(f"needs true or false in {name}, not {shortened(value)}")
    return bool(value)


def _literal(value: object, name: str) -> str:
    text = _text(value, name)
    return json.dumps(text) if text else '""'


def _pattern(value: object) -> str:
    """Return a regular expression between slashes, on one line."""
    text = _text(value, "regex.pattern")
    escaped = text.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n")
    return f"/{escaped}/"


def _error(reason: str) -> BadValue:
    return BadValue(f"guided.structural_tag {reason}", param=PARAM)
