"""Masks of all texts of a pass, in few calls of the library and in a time that is given."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import (
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from specserve.grammar.matcher import Bits, GrammarCompiler, GrammarMatcher, tokens_before_end

ROWS_OF_A_CALL = 64  # masks of a call of the library, between which there is time to stop
SLOW_MASK_S = 0.02
"""Seconds of a text's masks from which on it has a call of its own."""


@dataclass(frozen=True, slots=True)
class TextMasks:
    """Bits after each text and after each of its draft tokens."""

    bits: Bits  # [rows, words]
    late: frozenset[int]
    """Texts whose masks were not computed in time; their rows allow every token."""


def mask_texts(
    compiler: GrammarCompiler,
    asked: Sequence[tuple[GrammarMatcher, Sequence[int]]],
    *,
    budget_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> TextMasks:
    """Return the bits after each text and after each of its draft tokens.

    Rows after a draft token that is forbidden, or that ends the text, allow every token. Texts
    that were quick the last time go first, so that one expensive grammar takes the time of no
    other.
    """
    ends = list(accumulate((len(drafts) + 1 for _, drafts in asked), initial=0))
    bits = np.full((ends[-1], compiler.words), -1, np.int32)
    waiting = [
        _WaitingText(
            number, matcher, library, ends[number], tokens_before_end(drafts, compiler.end_ids)
        )
        for number, (matcher, drafts) in enumerate(asked)
        if (library := matcher.library_matcher) is not None and not matcher.is_terminated
    ]
    waiting.sort(key=lambda text: text.matcher.mask_s)
    until = clock() + budget_s
    for group in _groups(waiting):
        started = clock()
        if started > until:
            return TextMasks(bits, frozenset(text.number for text in waiting if not text.is_done))
        _fill(compiler, group, bits)
        seconds = (clock() - started) / len(group)
        for text in group:
            text.is_done, text.matcher.mask_s = True, seconds
    return TextMasks(bits, frozenset())


@dataclass(slots=True)
class _WaitingText:
    """A text that waits for its masks."""

    number: int
    matcher: GrammarMatcher
    library_matcher: LLMatcher
    first: int  # of its rows
    drafts: Sequence[int]
    is_done: bool = False


def _groups(texts: Sequence[_WaitingText]) -> Iterator[list[_WaitingText]]:
    """Yield texts that share a call of the library: slow ones are alone."""
    group: list[_WaitingText] = []
    rows = 0
    for text in texts:
        is_slow = text.matcher.mask_s > SLOW_MASK_S
        if group and (is_slow or rows + len(text.drafts) >= ROWS_OF_A_CALL):
            yield group
            group, rows = [], 0
        group.append(text)
        rows += len(text.drafts) + 1
    if group:
        yield group


def _reusable(text: _WaitingText) -> LLMatcher:
    """Return the text's matcher, or a copy where the library cannot take back the draft tokens.

    By trial, llguidance 1.9.1 counts the bytes of tokens that a grammar names by id as others.
    """
    own = text.library_matcher
    return own.deep_copy() if text.matcher.names_tokens else own


def _fill(compiler: GrammarCompiler, texts: Sequence[_WaitingText], bits: Bits) -> None:
    without_drafts = [(text.library_matcher, text.first) for text in texts if not text.drafts]
    with_drafts = [
        (_reusable(text), text.first, list(text.drafts)) for text in texts if text.drafts
    ]
    if without_drafts:
        fill_next_token_bitmask_par(compiler.executor, without_drafts, bits)
    if with_drafts:
        fill_next_token_bitmask_par_with_draft_tokens(compiler.executor, with_drafts, bits)
