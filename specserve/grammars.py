"""Whether a grammar can be obeyed at all, said before anything is queued. Knows no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llguidance import LLMatcher

from specserve.errors import BadValue
from specserve.types import Grammar

_READ: Mapping[str, Callable[[str], str]] = {
    "json_schema": LLMatcher.grammar_from_json_schema,
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
}


def check(grammar: Grammar) -> None:
    """Raises BadValue naming the keyword, or the place, that is not supported."""
    try:
        wrong = LLMatcher.validate_grammar(_READ[grammar.kind](grammar.text))
    except ValueError as error:
        wrong = str(error)
    if wrong:
        raise BadValue(f"the {grammar.kind.replace('_', ' ')} cannot be obeyed: {' '.join(wrong.split())[:200]}")
