"""Validation of grammars: their form in llguidance, and which of them no text can follow.

It knows no tokenizer and no model.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specserve.errors import BadValue, first_line
from specserve.types import GRAMMARS, Grammar

MAX_BYTES = {"json_schema": 256 * 1024, "regex": 64 * 1024, "lark": 64 * 1024}
MAX_CHECK_S = 0.5
"""Processor seconds of a check, which compiles a grammar and computes the mask of a first byte."""
SPACES = r" |\n[ \t]{0,40}"
"""Whitespace between the parts of JSON. Unbounded, a text could consist of spaces for ever."""

_PARAM = "grammar"
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: (\[.*\])")
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_REGEX_ERROR = re.compile(r"^error: (.*)$", re.MULTILINE)


def validate_grammar(grammar: Grammar) -> None:
    """Raise BadValue for a grammar that no text can follow, or that is not supported.

    The error names the keyword or the position. It takes milliseconds.
    """
    if grammar.kind not in GRAMMARS:
        raise BadValue(
            f"a grammar is one of {', '.join(GRAMMARS)}, not {grammar.kind!r}", param=_PARAM
        )
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError as half:
        raise BadValue(
            f"the {_NAMES[grammar.kind]} has half of a character at position {half.start}",
            param=_PARAM,
        ) from half
    if size > (most := MAX_BYTES[grammar.kind]):
        raise BadValue(
            f"the {_NAMES[grammar.kind]} has {size} bytes; {most} is the most", param=_PARAM
        )
    started = time.thread_time()  # a busy machine makes no grammar dear
    error = LLMatcher.validate_grammar(
        library_grammar(grammar), limits=parser_limits()
    ) or _why_impossible(grammar)
    if error and not error.startswith("WARNING"):
        raise BadValue(_ERROR_TEXTS[grammar.kind](error), param=_PARAM)
    seconds = time.thread_time() - started
    if seconds > MAX_CHECK_S:
        raise BadValue(
            f"the {_NAMES[grammar.kind]} takes {seconds:.2f} s for its first token, and "
            f"{MAX_CHECK_S} s is the most; simplify it",
            param=_PARAM,
        )


def library_grammar(grammar: Grammar) -> str:
    """Return the grammar in the library's form. Raises BadValue for a schema that is not JSON."""
    return _SOURCES[grammar.kind](grammar.text)


def parser_limits() -> LLParserLimits:
    """Return the limits of one grammar, in the library's units.

    Schemas of 60 kB stay within half of them. A mask beyond them has taken 0.6 s at worst. With
    the library's own fuel at the start, 1,000,000, the check of `((a{1000}){1000}){1000}` took
    1.4 s; with this it takes 0.1 s.
    """
    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=200_000,
        step_max_items=10_000,
        verbose_errors=False,
    )


def _why_impossible(grammar: Grammar) -> str:
    """Return why not even a first byte can be written, or none after it; "" if they can."""
    matcher = LLMatcher(
        LLTokenizer("byte"), library_grammar(grammar), log_level=0, limits=parser_limits()
    )
    # Computing the mask may itself find that nothing can follow, so errors are checked twice.
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        return "no text can follow it"
    number, bits = next((number, bits) for number, bits in enumerate(mask) if bits)
    # A grammar that is too dear says so here, and not first while the target waits for it.
    matcher.try_consume_tokens([8 * number + (bits & -bits).bit_length() - 1])
    return first_line(ValueError(matcher.get_error())) if matcher.is_error() else ""


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
        raise BadValue(_json_error(str(error)), param=_PARAM) from error


def _json_error(error: str) -> str:
    unknown = _UNKNOWN_KEYS.search(error)
    if unknown:
        keys = ", ".join(json.loads(unknown[1]))
        return f"the JSON schema uses {keys}, which is not supported; leave it out"
    found = _REGEX_ERROR.search(error)
    reason = f"pattern: {found[1]}" if found else _first_sentence(error)
    return f"the JSON schema cannot be followed: {reason}"


def _regex_error(error: str) -> str:
    lines = error.splitlines()
    # below the expression, which is indented by four columns
    carets = [line.index("^") - 4 for line in lines if line.strip() and set(line.strip()) == {"^"}]
    at = f" at character {carets[0] + 1}" if carets and carets[0] >= 0 else ""
    found = _REGEX_ERROR.search(error)
    return f"the regular expression is wrong{at}: {found[1] if found else _first_sentence(error)}"


def _lark_error(error: str) -> str:
    position = _POSITION.match(error)
    at = f" at line {position[1]}, column {position[2]}" if position else ""
    return f"the grammar is wrong{at}: {_first_sentence(_POSITION.sub('', error, count=1))}"


def _first_sentence(error: str) -> str:
    """Return the first sentence of the library's message.

    The rest is a listing, or a hint at the library's own options.
    """
    return error.strip().splitlines()[0].partition(". Enable ")[0]


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
_SOURCES: Mapping[str, Callable[[str], str]] = {
    "json_schema": _json_source,
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
}
_ERROR_TEXTS: Mapping[str, Callable[[str], str]] = {
    "json_schema": _json_error,
    "regex": _regex_error,
    "lark": _lark_error,
}
