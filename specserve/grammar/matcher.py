"""Texts under a grammar: which tokens may come next, and which must.

It knows tokens, no logits, no models and no rounds.

A grammar forces a token where there is one way to continue, in the tokenizer's own spelling. So
what is allowed depends on the tokens of the text alone, and is the same in every process, at any
time, and however often the text was rolled back.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import (
    fill_next_token_bitmask,
)
from numpy.typing import NDArray

from specserve.errors import first_line
from specserve.grammar.compile_queue import CompileQueue
from specserve.grammar.validate import library_grammar, parser_limits
from specserve.types import Grammar

Bits = NDArray[np.int32]  # [..., words]: a bit for each id

MAX_COMPILED = 64  # compiled grammars that are kept


class GrammarCompiler:
    """The grammars of one tokenizer; the most recently used are kept compiled.

    The tokenizer is loaded when the first grammar is needed.
    """

    def __init__(self, load: Callable[[], LLTokenizer], *, end_ids: frozenset[int]) -> None:
        self.end_ids = end_ids
        self._load = load
        self._queue = CompileQueue(self._compile)
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Callable[[], str], *, vocab_size: int, end_ids: frozenset[int]
    ) -> GrammarCompiler:
        """Make one for a model with `vocab_size` ids.

        The tokenizer is given in the format of the tokenizers library.
        """
        return cls(
            lambda: LLTokenizer(tokenizer(), n_vocab=vocab_size, eos_token=sorted(end_ids)),
            end_ids=end_ids,
        )

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        return self._load()

    @cached_property
    def executor(self) -> LLExecutor:
        """Executor with one thread: the cores are needed by the pass."""
        return LLExecutor(1)

    @property
    def words(self) -> int:
        """Number of int32 words in a row of bits."""
        return (self.tokenizer.vocab_size + 31) // 32

    def preload_tokenizer(self) -> None:
        """Load the tokenizer in the background, before the first grammar needs it."""
        self._queue.run(lambda: self.tokenizer)

    def request(self, grammar: Grammar) -> None:
        """Compile the grammar in the background, unless it is kept compiled."""
        if self.end_ids and grammar not in self._compiled:
            self._queue.request(grammar)

    def is_ready(self, grammar: Grammar, *, until: float = -math.inf) -> bool:
        """Return whether `start` answers at once, after a short wait that may last `until` then.

        The time is that of `time.monotonic`.
        """
        return (
            not self.end_ids
            or grammar in self._compiled
            or self._queue.is_ready(grammar, until=until)
        )

    def drop(self, grammar: Grammar) -> None:
        """Drop a request that no text waits for any more."""
        self._queue.drop(grammar)

    def start(self, grammar: Grammar) -> GrammarMatcher:
        """Return the matcher of an empty text. For an impossible grammar its `error` says why."""
        if not self.end_ids:
            return GrammarMatcher(
                self,
                None,
                error="the model has no token to end a text with, so it can follow no grammar",
            )
        try:
            matcher = self._compiled.pop(grammar, None) or self._queue.take(grammar)
        except Exception as error:  # of this grammar: it ends the texts under it alone
            return GrammarMatcher(self, None, error=first_line(error))
        self._compiled[grammar] = matcher
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return GrammarMatcher(self, matcher.deep_copy(), names_tokens=_names_tokens(grammar))

    def _compile(self, grammar: Grammar) -> LLMatcher:
        return LLMatcher(
            self.tokenizer, library_grammar(grammar), log_level=0, limits=parser_limits()
        )


class GrammarMatcher:
    """One text under a grammar, which grows and is rolled back at its end.

    Tokens after an end token, or after a forbidden one, are under no grammar.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        matcher: LLMatcher | None,
        *,
        names_tokens: bool = False,
        error: str | None = None,
    ) -> None:
        self.names_tokens = names_tokens
        self.tokens: list[int] = []
        self._compiler, self._matcher = compiler, matcher
        self._num_consumed = 0  # tokens that the grammar has accepted
        self._error = error
        self._bits: Bits | None = None  # of the next token, once computed
        self.mask_s = 0.0  # what its masks took in the last pass

    @property
    def error(self) -> str | None:
        """Reason why the text cannot go on: the grammar is impossible, or takes too much."""
        if self._error is None and self._matcher is not None and self._matcher.is_error():
            self._error = first_line(ValueError(self._matcher.get_error()))
        return self._error

    @property
    def library_matcher(self) -> LLMatcher | None:
        """The library's own; None if the grammar was impossible from the start."""
        return self._matcher

    @property
    def is_terminated(self) -> bool:
        """True if nothing can follow: the text has ended, or does not follow the grammar."""
        return self._num_consumed < len(self.tokens) or self.error is not None

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """Truncate the text to `start` tokens and append these. `start` is at most its length."""
        assert start <= len(self.tokens)
        del self.tokens[start:]
        if self._num_consumed > start:
            if self._matcher is not None:
                self._matcher.rollback(self._num_consumed - start)
            self._num_consumed = start
        self._bits = None
        was_terminated = self.is_terminated
        self.tokens += tokens
        if not was_terminated:
            self._consume_new_tokens()

    def bits(self) -> Bits:  # [words]
        """Return the bits of the tokens that may come next.

        Only another end token may come after the end, and no token after an error.
        """
        if self._bits is None:
            self._bits = np.zeros((1, self._compiler.words), np.int32)
            if self.error is None and not self.is_terminated:
                assert self._matcher is not None
                fill_next_token_bitmask(self._matcher, self._bits)
            elif self.error is None:
                ends = np.array(sorted(self._compiler.end_ids))
                np.bitwise_or.at(
                    self._bits[0].view(np.uint32),
                    ends // 32,
                    np.uint32(1) << (ends % 32).astype(np.uint32),
                )
        bits: Bits = self._bits[0]
        return bits

    def forced_tokens(self, limit: int) -> list[int]:
        """Return the next tokens, `limit` at most, as long as each is the only one allowed."""
        if self.is_terminated or limit <= 0:
            return []
        assert self._matcher is not None
        tokens = self._matcher.compute_ff_tokens()[:limit]
        if tokens:
            return tokens
        only = np.flatnonzero(
            np.unpackbits(self.bits().view(np.uint8), bitorder="little")[
                : self._compiler.tokenizer.vocab_size
            ]
        )
        return only.tolist() if len(only) == 1 else []

    def num_valid(self, tokens: Sequence[int]) -> int:
        """Count how many of these may follow in a row, up to one that ends the text.

        Neither the spelling is checked nor whether the text may end there: verification does that.
        """
        if self.is_terminated:
            return 0
        assert self._matcher is not None
        inner = list(tokens_before_end(tokens, self._compiler.end_ids))
        num_valid = self._matcher.validate_tokens(inner) if inner else 0
        return num_valid + (num_valid == len(inner) < len(tokens))

    def fork(self, length: int) -> GrammarMatcher:
        """Return the matcher of another text with the same first `length` tokens."""
        other = GrammarMatcher(
            self._compiler,
            None if self._matcher is None else self._matcher.deep_copy(),
            names_tokens=self.names_tokens,
            error=self._error,
        )
        other.tokens, other._num_consumed = list(self.tokens), self._num_consumed
        other.write(min(length, len(self.tokens)), ())
        return other

    def _consume_new_tokens(self) -> None:
        """Advance the grammar over the new tokens, as far as it accepts them."""
        assert self._matcher is not None
        self._num_consumed += self._matcher.try_consume_tokens(
            list(tokens_before_end(self.tokens[self._num_consumed :], self._compiler.end_ids))
        )


def _names_tokens(grammar: Grammar) -> bool:
    """Return whether a grammar may name tokens by their ids."""
    return grammar.kind == "lark" and "<[" in grammar.text


def tokens_before_end(tokens: Sequence[int], end_ids: frozenset[int]) -> Sequence[int]:
    """Return the tokens before the first one that ends a text."""
    return tokens[: next((i for i, token in enumerate(tokens) if token in end_ids), len(tokens))]
