"""Grammars as texts: what they mean to the library that compiles them, and which can never be followed. Knows no tokenizer and no model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specserve.errors import BadValue
from specserve.types import GRAMMARS, Grammar

MAX_BYTES = 64 * 1024
SPACES = r" |\n[ \t]{0,40}"  # between the parts of JSON, if any: no more than people write, or a text may be spaces for ever

_PARAM = "grammar"
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: (\[.*\])")
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_REGEX_ERROR = re.compile(r"^error: (.*)$", re.MULTILINE)


def check(grammar: Grammar) -> None:
    """Raises BadValue, which names the keyword or the place, for what no text could follow, or what is not supported. Takes milliseconds."""
    if grammar.kind not in GRAMMARS:
        raise BadValue(
            f"a grammar is one of {', '.join(GRAMMARS)}, not {grammar.kind!r}", param=_PARAM
        )
    size = len(grammar.text.encode(errors="replace"))
    if size > MAX_BYTES:
        raise BadValue(
            f"the {_NAMES[grammar.kind]} has {size} bytes; {MAX_BYTES} is the most", param=_PARAM
        )
    error = LLMatcher.validate_grammar(source(grammar), limits=limits()) or _impossible(grammar)
    if error and not error.startswith("WARNING"):
        raise BadValue(_SAID[grammar.kind](error), param=_PARAM)


def source(grammar: Grammar) -> str:
    """As the library reads it. Raises BadValue for a schema that is no JSON."""
    return _SOURCES[grammar.kind](grammar.text)


def limits() -> LLParserLimits:
    """What one grammar may take: some 20 ms to compile, and as much for a mask at the very worst."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        verbose_errors=False,
    )


def _impossible(grammar: Grammar) -> str:
    """Why not even a first byte can be written; "" if one can."""
    matcher = LLMatcher(LLTokenizer("byte"), source(grammar), log_level=0, limits=limits())
    able = not matcher.is_error() and any(matcher.compute_bitmask())
    return (
        "" if able and not matcher.is_error() else "no text can follow it"
    )  # that there is no way on is found on the way


def _json_source(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadValue(f"the JSON schema is no JSON: {error}", param=_PARAM) from error
    if schema is True:  # anything at all
        text, schema = "{}", {}
    if not isinstance(schema, dict):
        raise BadValue(
            f"a JSON schema that can be followed is an object, or true, not {str(schema)[:20]}",
            param=_PARAM,
        )
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": SPACES})
    except ValueError as error:  # of x-guidance, the library's own keyword
        raise BadValue(_json_said(str(error)), param=_PARAM) from error


def _json_said(error: str) -> str:
    unknown = _UNKNOWN_KEYS.search(error)
    if unknown:
        keys = ", ".join(json.loads(unknown[1]))
        return f"the JSON schema uses {keys}, which is not supported; leave it out"
    found = _REGEX_ERROR.search(error)
    return (
        f"the JSON schema cannot be followed: {f'pattern: {found[1]}' if found else _first(error)}"
    )


def _regex_said(error: str) -> str:
    lines = error.splitlines()
    carets = [
        line.index("^") - 4 for line in lines if line.strip() and set(line.strip()) == {"^"}
    ]  # below the expression, which is indented
    at = f" at character {carets[0] + 1}" if carets and carets[0] >= 0 else ""
    found = _REGEX_ERROR.search(error)
    return f"the regular expression is wrong{at}: {found[1] if found else _first(error)}"


def _lark_said(error: str) -> str:
    place = _PLACE.match(error)
    at = f" at line {place[1]}, column {place[2]}" if place else ""
    return f"the grammar is wrong{at}: {_first(_PLACE.sub('', error, count=1))}"


def _first(error: str) -> str:
    """Of the library's message the first sentence: what follows is a listing, or a hint at its own options."""
    return error.strip().splitlines()[0].partition(". Enable ")[0]


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
_SOURCES: Mapping[str, Callable[[str], str]] = {
    "json_schema": _json_source,
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
}
_SAID: Mapping[str, Callable[[str], str]] = {
    "json_schema": _json_said,
    "regex": _regex_said,
    "lark": _lark_said,
}
