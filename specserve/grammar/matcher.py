"""Texts under a grammar: which tokens may come next, and which must. Knows tokens, no logits, no models and no rounds.

A grammar leaves one token where it leaves one way to write on, in the tokenizer's own spelling: so what is allowed depends on the tokens
of the text alone, and is the same whoever asks, whenever, and however often the text went back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import (
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)
from numpy.typing import NDArray

from specserve.errors import SpecserveError, first_line
from specserve.grammar.validate import limits, source
from specserve.types import Grammar

Bits = NDArray[np.int32]  # [..., words]: a bit for each id

KEPT = 64  # compiled grammars


class Grammars:
    """The grammars of one tokenizer, the latest of which are kept compiled. The tokenizer is read when the first is wanted."""

    def __init__(self, load: Callable[[], LLTokenizer], *, end_ids: frozenset[int]) -> None:
        self.end_ids = end_ids
        self._load = load
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    @classmethod
    def of(
        cls, tokenizer: Callable[[], str], *, vocab_size: int, end_ids: frozenset[int]
    ) -> Grammars:
        """Of a tokenizer in the format of the tokenizers library, for a model with so many ids."""
        return cls(
            lambda: LLTokenizer(tokenizer(), n_vocab=vocab_size, eos_token=sorted(end_ids)),
            end_ids=end_ids,
        )

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        return self._load()

    @cached_property
    def executor(self) -> LLExecutor:
        """One thread: the cores are the pass's."""
        return LLExecutor(1)

    @property
    def words(self) -> int:
        return (self.tokenizer.vocab_size + 31) // 32

    def begun(self, grammar: Grammar) -> Parse:
        """An empty text. One that cannot be written says why in its `error`."""
        if not self.end_ids:
            return Parse(
                self,
                None,
                error="the model has no token to end a text with, so it can follow no grammar",
            )
        matcher = self._compiled.pop(grammar, None)
        try:
            matcher = matcher or LLMatcher(
                self.tokenizer, source(grammar), log_level=0, limits=limits()
            )
        except SpecserveError as error:
            return Parse(self, None, error=str(error))
        self._compiled[grammar] = matcher
        while len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
        return Parse(self, matcher.deep_copy())


class Parse:
    """One text, which grows and goes back at its end. What lies behind an end token, or a forbidden one, is under no grammar."""

    def __init__(
        self, grammars: Grammars, matcher: LLMatcher | None, *, error: str | None = None
    ) -> None:
        self.tokens: list[int] = []
        self._grammars, self._matcher = grammars, matcher
        self._read = 0  # tokens that the grammar has taken
        self._error = error
        self._bits: Bits | None = None  # of the next token, once somebody has asked

    @property
    def error(self) -> str | None:
        """Why nothing more can be said of the text: its grammar is impossible, or takes too much."""
        if self._error is None and self._matcher is not None and self._matcher.is_error():
            self._error = first_line(ValueError(self._matcher.get_error()))
        return self._error

    @property
    def is_over(self) -> bool:
        """Nothing can follow: it has ended, or was no such text."""
        return self._read < len(self.tokens) or self.error is not None

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """Whatever stands past `start`, which is no more than there is, gives way to the tokens."""
        assert start <= len(self.tokens)
        del self.tokens[start:]
        if self._read > start:
            if self._matcher is not None:
                self._matcher.rollback(self._read - start)
            self._read = start
        self._bits = None
        was_over = self.is_over
        self.tokens += tokens
        if not was_over:
            self._advance()

    def bits(self) -> Bits:  # [words]
        """What may come next. Behind the end only another end; nothing where there is an error."""
        if self._bits is None:
            self._bits = np.zeros((1, self._grammars.words), np.int32)
            if self.error is None and not self.is_over:
                assert self._matcher is not None
                fill_next_token_bitmask(self._matcher, self._bits)
            elif self.error is None:
                ends = np.array(sorted(self._grammars.end_ids))
                np.bitwise_or.at(
                    self._bits[0].view(np.uint32),
                    ends // 32,
                    np.uint32(1) << (ends % 32).astype(np.uint32),
                )
        bits: Bits = self._bits[0]
        return bits

    def forced(self, limit: int) -> list[int]:
        """The next tokens, `limit` at most, as far as each is the only one."""
        if self.is_over or limit <= 0:
            return []
        assert self._matcher is not None
        tokens = self._matcher.compute_ff_tokens()[:limit]
        if tokens:
            return tokens
        only = np.flatnonzero(
            np.unpackbits(self.bits().view(np.uint8), bitorder="little")[
                : self._grammars.tokenizer.vocab_size
            ]
        )
        return only.tolist() if len(only) == 1 else []

    def lawful(self, tokens: Sequence[int]) -> int:
        """How many of these may follow in a row, up to one that ends the text.

        Neither the spelling is looked at nor whether the text may end there: whoever judges them does.
        """
        if self.is_over:
            return 0
        assert self._matcher is not None
        lawful = list(_before_end(tokens, self._grammars.end_ids))
        stand = self._matcher.validate_tokens(lawful) if lawful else 0
        return stand + (stand == len(lawful) < len(tokens))

    def fork(self, length: int) -> Parse:
        """Another text with the same first `length` tokens."""
        other = Parse(
            self._grammars,
            None if self._matcher is None else self._matcher.deep_copy(),
            error=self._error,
        )
        other.tokens, other._read = list(self.tokens), self._read
        other.write(min(length, len(self.tokens)), ())
        return other

    def _advance(self) -> None:
        """Takes what it can of the tokens that are new."""
        assert self._matcher is not None
        self._read += self._matcher.try_consume_tokens(
            list(_before_end(self.tokens[self._read :], self._grammars.end_ids))
        )


def rows_of(
    grammars: Grammars, asked: Sequence[tuple[Parse, Sequence[int]]]
) -> Bits:  # [rows, words]
    """What may come behind each text and behind each of its drafts; rows behind a draft that may not stand, or ends the text, allow all."""
    counts = [len(drafts) + 1 for _, drafts in asked]
    bits = np.full((sum(counts), grammars.words), -1, np.int32)
    alone, drafted, first = [], [], 0
    for (parse, drafts), count in zip(asked, counts, strict=True):
        if parse._matcher is not None and not parse.is_over:
            lawful = _before_end(drafts, grammars.end_ids)
            if lawful:
                drafted.append((parse._matcher, first, list(lawful)))
            else:
                alone.append((parse._matcher, first))
        first += count
    if alone:
        fill_next_token_bitmask_par(grammars.executor, alone, bits)
    if drafted:
        fill_next_token_bitmask_par_with_draft_tokens(grammars.executor, drafted, bits)
    return bits


def _before_end(tokens: Sequence[int], end_ids: frozenset[int]) -> Sequence[int]:
    """What stands before the first token that ends a text."""
    return tokens[: next((i for i, token in enumerate(tokens) if token in end_ids), len(tokens))]
