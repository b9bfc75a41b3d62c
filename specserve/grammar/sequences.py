"""The grammar states of all sequences of one worker, kept up to date by its steps.

It knows no logits.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from specserve.grammar.mask import TokenMask
from specserve.grammar.matcher import Bits, GrammarCompiler, GrammarMatcher
from specserve.grammar.text_masks import mask_texts
from specserve.types import DraftStep, Grammar, VerifyStep

LEFT_GRAMMAR = "the text has left its grammar"
NO_VALID_TOKEN = "the grammar leaves no token that the model knows"
TOO_SLOW = "the grammar takes too long to follow; simplify it"
PASS_MASKS_S = 2.0
"""Seconds of a pass's masks, after which texts without theirs fail, and the pass goes on."""

PATIENCE_S = 0.25
"""Seconds for which a pass waits for grammars if no other sequence takes part in it."""

TokenLookup = Callable[[int], Sequence[int] | NDArray[np.int64]]
"""All tokens of a sequence that a worker has cached, the prompt's included."""


@dataclass(frozen=True, slots=True)
class SequenceGrammar:
    """A sequence's grammar, and the length of the prompt before the text that it constrains."""

    grammar: Grammar
    prompt_length: int


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """Tokens that a step writes after the first `start` tokens of a text, and draft tokens."""

    seq_id: int
    start: int
    tokens: tuple[int, ...]
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftedSequence:
    """All tokens of a sequence, with the prompt's, and draft tokens after them."""

    seq_id: int
    grammar: SequenceGrammar | None
    tokens: tuple[int, ...]
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PassMasks:
    """Mask of a pass's rows, and the reasons why some of its sequences cannot go on."""

    token_mask: TokenMask
    errors: dict[int, str] = field(default_factory=dict)  # by sequence
    undecided: frozenset[int] = frozenset()
    """Sequences whose grammars are not compiled yet. Nothing is decided on them in this pass."""


class GrammarStates:
    """Matchers of sequences. They follow steps as the KV cache does.

    A step truncates the text to its start, a fork shares the text before it, a release drops it.
    The grammar comes with the steps that start at 0, and is kept. Without a `grammar_compiler`
    nothing is constrained.
    """

    def __init__(self, grammar_compiler: GrammarCompiler | None) -> None:
        self.grammar_compiler = grammar_compiler
        self._grammars: dict[int, SequenceGrammar] = {}
        self._matchers: dict[int, GrammarMatcher] = {}

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar")

    def register(self, steps: Sequence[DraftStep | VerifyStep]) -> None:
        """Take over the grammars of these steps, and begin to compile them.

        A worker calls this before it executes steps.
        """
        if self.grammar_compiler is None:
            return
        for step in steps:
            if step.grammar is not None:
                self.set_grammar(
                    step.seq_id, SequenceGrammar(step.grammar, step.policy.prompt_length)
                )

    def set_grammar(self, seq_id: int, grammar: SequenceGrammar) -> None:
        """Start a matcher for this grammar, unless the sequence already has it."""
        if self._grammars.get(seq_id) != grammar:
            self._grammars[seq_id] = grammar
            self._matchers.pop(seq_id, None)
            if self.grammar_compiler is not None:
                self.grammar_compiler.request(grammar.grammar)

    def advance(self, step: DraftStep, lookup: TokenLookup) -> GrammarMatcher | None:
        """Return the matcher of the text up to the end of the step.

        None without a grammar, or with one that is not compiled yet: draft tokens then follow none.
        """
        if step.seq_id not in self._grammars or not self._is_ready(step.seq_id, -math.inf):
            return None
        return self._apply_update(self._text_update(step, lookup))

    def mask_for(self, sequences: Sequence[DraftedSequence]) -> TokenMask:
        """Return the mask of rows for each draft token, and one more, of each sequence in turn."""
        if self.grammar_compiler is None or all(one.grammar is None for one in sequences):
            return TokenMask.from_rows([])
        found, first = [], 0
        for one in sequences:
            if one.grammar is not None:
                self.set_grammar(one.seq_id, one.grammar)
                found.append((first, self._matcher_at(one, one.grammar), one.drafts))
            first += len(one.drafts) + 1
        masks = mask_texts(
            self.grammar_compiler, [(matcher, drafts) for _, matcher, drafts in found]
        )
        return self._mask(found, masks.bits)

    def get(self, seq_id: int) -> GrammarMatcher | None:
        """Return the matcher of a sequence, where the last step left it."""
        return self._matchers.get(seq_id)

    def submit_masks(
        self, steps: Sequence[VerifyStep], lookup: TokenLookup, *, has_others: bool = False
    ) -> Future[PassMasks] | None:
        """Start to compute the masks of a pass beside it; None if no step has a grammar.

        `lookup` is called before this returns. The pass `has_others` if steps without a decision
        take part in it.
        """
        updates, first = [], 0
        for step in steps:
            if step.policy.constrained:
                updates.append((first, self._text_update(step, lookup)))
            first += len(step.drafts) + 1
        if not updates:
            return None
        return self._thread.submit(
            self._masks, updates, has_others=has_others or len(updates) < len(steps)
        )

    def fork(self, seq_id: int, branch_id: int, length: int) -> None:
        """Make `branch_id` another sequence with the same first `length` tokens."""
        grammar = self._grammars.get(seq_id)
        if grammar is None:
            return
        self._grammars[branch_id] = grammar
        if seq_id in self._matchers:
            self._matchers[branch_id] = self._matchers[seq_id].fork(
                max(length - grammar.prompt_length, 0)
            )

    def promote_branch(self, seq_id: int, branch_id: int) -> None:
        """Replace a sequence's matcher by that of its branch.

        The grammar comes along: the sequence itself may have been released, as in a cascade's
        stage that has cached the branch alone.
        """
        if branch_id in self._grammars:
            self._grammars[seq_id] = self._grammars.pop(branch_id)
        if branch_id in self._matchers:
            self._matchers[seq_id] = self._matchers.pop(branch_id)

    def release(self, seq_ids: Sequence[int]) -> None:
        """Drop these sequences. A grammar that none of the others has is not compiled any more."""
        for seq_id in seq_ids:
            dropped = self._grammars.pop(seq_id, None)
            is_compiled = self._matchers.pop(seq_id, None) is not None
            if (
                self.grammar_compiler is not None
                and dropped is not None
                and not is_compiled
                and all(dropped.grammar != other.grammar for other in self._grammars.values())
            ):
                self.grammar_compiler.drop(dropped.grammar)

    def _text_update(self, step: DraftStep | VerifyStep, lookup: TokenLookup) -> TextUpdate:
        """Return what the step changes in the text that its grammar constrains.

        Tokens that no step has brought here, such as the tokens of a cached prefix, are looked up.
        """
        grammar, matcher = self._grammars.get(step.seq_id), self._matchers.get(step.seq_id)
        assert grammar is not None, (
            "a grammar comes with the step that starts at 0, to workers with a tokenizer"
        )
        held = grammar.prompt_length + (0 if matcher is None else len(matcher.tokens))
        start, tokens = step.start, step.tokens
        if start > held:
            start, tokens = held, (*map(int, lookup(step.seq_id)[held:start]), *tokens)
        return TextUpdate(
            step.seq_id,
            max(start - grammar.prompt_length, 0),
            tokens[max(grammar.prompt_length - start, 0) :],
            step.drafts if isinstance(step, VerifyStep) else (),
        )

    def _apply_update(self, update: TextUpdate) -> GrammarMatcher:
        matcher = self._matcher(update.seq_id)
        matcher.write(update.start, update.tokens)
        return matcher

    def _matcher(self, seq_id: int) -> GrammarMatcher:
        """Return the sequence's matcher; a new one if it has none."""
        assert self.grammar_compiler is not None
        matcher = self._matchers.get(seq_id)
        if matcher is None:
            matcher = self.grammar_compiler.start(self._grammars[seq_id].grammar)
            self._matchers[seq_id] = matcher
        return matcher

    def _matcher_at(self, one: DraftedSequence, grammar: SequenceGrammar) -> GrammarMatcher:
        """Return the sequence's matcher, advanced or rolled back to these tokens."""
        matcher, text = self._matcher(one.seq_id), list(one.tokens[grammar.prompt_length :])
        same = min(len(text), len(matcher.tokens))
        if matcher.tokens[:same] != text[:same]:
            same = next(
                i
                for i, (ours, theirs) in enumerate(zip(matcher.tokens, text, strict=False))
                if ours != theirs
            )
        matcher.write(same, text[same:])
        return matcher

    def _is_ready(self, seq_id: int, until: float) -> bool:
        """Return whether the sequence's matcher exists, or can be made at once."""
        assert self.grammar_compiler is not None
        return seq_id in self._matchers or self.grammar_compiler.is_ready(
            self._grammars[seq_id].grammar, until=until
        )

    def _masks(
        self, updates: Sequence[tuple[int, TextUpdate]], *, has_others: bool = False
    ) -> PassMasks:
        """Return the masks of a pass, from each update and the first of its rows.

        Texts whose grammars are not compiled yet have none; others do not wait for them.
        """
        has_others |= any(update.seq_id in self._matchers for _, update in updates)
        until = -math.inf if has_others else time.monotonic() + PATIENCE_S
        ready = {update.seq_id for _, update in updates if self._is_ready(update.seq_id, until)}
        undecided = frozenset(update.seq_id for _, update in updates) - ready
        known = [(first, update) for first, update in updates if update.seq_id in ready]
        if not known:
            return PassMasks(TokenMask.from_rows([]), undecided=undecided)
        return replace(self._masks_of_ready(known), undecided=undecided)

    def _masks_of_ready(self, updates: Sequence[tuple[int, TextUpdate]]) -> PassMasks:
        """Return the masks of texts whose grammars are compiled.

        Equal texts have the masks of the first of them. Other threads run meanwhile.
        """
        assert self.grammar_compiler is not None
        found = [(first, self._apply_update(update), update.drafts) for first, update in updates]
        grammars = [self._grammars[update.seq_id] for _, update in updates]
        uses, firsts = Counter(grammars), dict[object, int]()
        # of each text, the first that is equal
        same_as = [
            firsts.setdefault(
                (grammar, (*matcher.tokens,), drafts) if uses[grammar] > 1 else number, number
            )
            for number, (grammar, (_, matcher, drafts)) in enumerate(
                zip(grammars, found, strict=True)
            )
        ]
        computed = {number: place for place, number in enumerate(firsts.values())}
        masks = mask_texts(
            self.grammar_compiler, [found[number][1:] for number in computed], budget_s=PASS_MASKS_S
        )
        starts = list(accumulate((len(found[number][2]) + 1 for number in computed), initial=0))
        errors, rows = {}, []
        for (_, update), (_, matcher, drafts), number in zip(updates, found, same_as, strict=True):
            place = computed[number]
            first = starts[place]
            rows.append(np.arange(first, first + len(drafts) + 1))
            error = self._error(found[number][1], masks.bits[first], is_late=place in masks.late)
            if error is not None:
                errors[update.seq_id] = error
            matcher.mask_s = found[number][1].mask_s
        return PassMasks(self._mask(found, masks.bits[np.concatenate(rows)]), errors)

    @staticmethod
    def _error(matcher: GrammarMatcher, bits: Bits, *, is_late: bool) -> str | None:
        """Return why a text cannot go on after these bits of its next token; None if it can."""
        if matcher.error is not None:
            return matcher.error
        if matcher.is_terminated:
            return LEFT_GRAMMAR
        if is_late:
            return TOO_SLOW
        return None if bits.any() else NO_VALID_TOKEN

    @staticmethod
    def _mask(found: Sequence[tuple[int, GrammarMatcher, Sequence[int]]], bits: Bits) -> TokenMask:
        """Return the mask of these rows; rows that forbid every token allow all instead.

        Such a row belongs to a text that has an error or a draft token that is rejected before it.
        Any distribution will do there, but there must be one.
        """
        bits[~bits.any(axis=1)] = -1
        return TokenMask(
            np.concatenate(
                [np.arange(first, first + len(drafts) + 1) for first, _, drafts in found]
            ),
            bits,
        )
