"""The answer to whether a grammar of `guided` derives a text, byte by byte as in decoding."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer

from specserve.grammar.request import parse_guided
from specserve.grammar.validate import library_grammar, parser_limits, validate_grammar

FORBIDDEN, PREFIX, WHOLE = "forbidden", "prefix", "whole"


def how_far(guided: dict[str, object], text: str) -> str:
    """Return whether the grammar forbids the text, begins with it or derives it."""
    grammar = parse_guided(guided)
    assert grammar is not None
    validate_grammar(grammar)
    matcher = LLMatcher(
        LLTokenizer("byte"), library_grammar(grammar), log_level=0, limits=parser_limits()
    )
    for byte in text.encode():
        if not matcher.compute_bitmask()[byte // 8] >> byte % 8 & 1:
            return FORBIDDEN
        assert matcher.consume_token(byte), matcher.get_error()
    return WHOLE if matcher.is_accepting() else PREFIX
