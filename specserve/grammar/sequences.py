"""The texts under grammars that one worker has in its hands, each as its steps say. Knows no logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specserve.grammar.mask import Allowed
from specserve.grammar.matcher import Bits, Grammars, Parse, rows_of
from specserve.types import DraftStep, Grammar, VerifyStep

LEFT = "the text has left its grammar"
STUCK = "the grammar leaves no token that the model knows"

Known = Callable[
    [int], Sequence[int] | NDArray[np.int64]
]  # all tokens of a sequence that a worker holds, the prompt's included


@dataclass(frozen=True, slots=True)
class Rule:
    """A sequence's grammar, and how many tokens of its prompt stand before the text."""

    grammar: Grammar
    base: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What a step says of a text: behind its first `start` tokens stand these, and behind them perhaps drafts."""

    seq_id: int
    start: int
    tokens: tuple[int, ...]
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Guessed:
    """All tokens of a sequence, with the prompt's, and guesses behind them."""

    seq_id: int
    rule: Rule | None
    tokens: tuple[int, ...]
    guesses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Masks:
    """Of a pass: which tokens its rows may have, and which of its steps cannot be gone on with, and why."""

    allowed: Allowed
    errors: dict[int, str] = field(default_factory=dict)  # by sequence


class Parses:
    """As pages are: a step drops what lies past its start, forks share what lies before it, and what is released is gone.

    The grammar itself comes with the steps that start at 0, and is remembered. Without `grammars`, nothing is constrained.
    """

    def __init__(self, grammars: Grammars | None) -> None:
        self.grammars = grammars
        self._rules: dict[int, Rule] = {}
        self._parses: dict[int, Parse] = {}

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar")

    def warm(self) -> None:
        """Reads the tokenizer before it is wanted, beside whatever else there is to do."""
        if self.grammars is not None:
            self._thread.submit(lambda grammars: grammars.tokenizer, self.grammars)

    def meet(self, steps: Sequence[DraftStep | VerifyStep]) -> None:
        """Whoever answers steps shows them all here first."""
        if self.grammars is None:
            return
        for step in steps:
            if step.grammar is not None:
                self.begin(step.seq_id, Rule(step.grammar, step.policy.prompt_length))

    def begin(self, seq_id: int, rule: Rule) -> None:
        """Nothing is changed where it was known."""
        if self._rules.get(seq_id) != rule:
            self._rules[seq_id] = rule
            self._parses.pop(seq_id, None)

    def follow(self, step: DraftStep, known: Known) -> Parse | None:
        """The text up to the end of the step; None where no grammar applies."""
        return self._read(self._reading(step, known)) if step.seq_id in self._rules else None

    def allowed(self, asked: Sequence[Guessed]) -> Allowed:
        """Of rows for each guess, and one more, of each of these in turn."""
        if self.grammars is None or all(one.rule is None for one in asked):
            return Allowed.of([])
        found, first = [], 0
        for one in asked:
            if one.rule is not None:
                self.begin(one.seq_id, one.rule)
                found.append((first, self._at(one), one.guesses))
            first += len(one.guesses) + 1
        return self._rows(
            found, rows_of(self.grammars, [(parse, guesses) for _, parse, guesses in found])
        )

    def of(self, seq_id: int) -> Parse | None:
        """The text as it was read last."""
        return self._parses.get(seq_id)

    def masking(self, steps: Sequence[VerifyStep], known: Known) -> Future[Masks] | None:
        """The masks of a pass, made beside it; None where no grammar applies. `known` is asked now."""
        readings, first = [], 0
        for step in steps:
            if step.policy.constrained:
                readings.append((first, self._reading(step, known)))
            first += len(step.drafts) + 1
        return self._thread.submit(self._masks, readings) if readings else None

    def fork(self, seq_id: int, as_id: int, length: int) -> None:
        """`as_id` is another sequence with the same first `length` tokens."""
        if seq_id in self._parses:
            rule = self._rules[as_id] = self._rules[seq_id]
            self._parses[as_id] = self._parses[seq_id].fork(max(length - rule.base, 0))

    def become(self, seq_id: int, branch_id: int) -> None:
        self._rules.pop(branch_id, None)
        if branch_id in self._parses:
            self._parses[seq_id] = self._parses.pop(branch_id)

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._rules.pop(seq_id, None)
            self._parses.pop(seq_id, None)

    def _reading(self, step: DraftStep | VerifyStep, known: Known) -> Reading:
        """Tokens that nobody has shown here are taken from what the worker knows of the sequence."""
        rule, parse = self._rules.get(step.seq_id), self._parses.get(step.seq_id)
        assert rule is not None, (
            "a grammar comes with the step that starts at 0, to workers with a tokenizer"
        )
        held = rule.base + (0 if parse is None else len(parse.tokens))
        start, tokens = step.start, step.tokens
        if start > held:
            start, tokens = held, (*map(int, known(step.seq_id)[held:start]), *tokens)
        drafts = step.drafts if isinstance(step, VerifyStep) else ()
        return Reading(
            step.seq_id, max(start - rule.base, 0), tokens[max(rule.base - start, 0) :], drafts
        )

    def _read(self, reading: Reading) -> Parse:
        parse = self._parse(reading.seq_id)
        parse.write(reading.start, reading.tokens)
        return parse

    def _parse(self, seq_id: int) -> Parse:
        assert self.grammars is not None
        parse = self._parses.get(seq_id)
        if parse is None:
            parse = self._parses[seq_id] = self.grammars.begun(self._rules[seq_id].grammar)
        return parse

    def _at(self, one: Guessed) -> Parse:
        """The text as these tokens say, however it was read before."""
        assert one.rule is not None
        parse, text = self._parse(one.seq_id), list(one.tokens[one.rule.base :])
        same = min(len(text), len(parse.tokens))
        if parse.tokens[:same] != text[:same]:
            same = next(
                i
                for i, (ours, theirs) in enumerate(zip(parse.tokens, text, strict=False))
                if ours != theirs
            )
        parse.write(same, text[same:])
        return parse

    def _masks(self, readings: Sequence[tuple[int, Reading]]) -> Masks:
        """Each reading with the first of its rows. One call for all texts, during which other threads run."""
        assert self.grammars is not None
        found = [(first, self._read(reading), reading.drafts) for first, reading in readings]
        errors = {
            reading.seq_id: LEFT
            for (_, reading), (_, parse, _) in zip(readings, found, strict=True)
            if parse.is_over
        }
        bits = rows_of(self.grammars, [(parse, drafts) for _, parse, drafts in found])
        row = 0
        for (_, reading), (_, parse, drafts) in zip(readings, found, strict=True):
            why = parse.error or (None if bits[row].any() else STUCK)
            if why is not None:
                errors[reading.seq_id] = why
            row += len(drafts) + 1
        return Masks(self._rows(found, bits), errors)

    @staticmethod
    def _rows(found: Sequence[tuple[int, Parse, Sequence[int]]], bits: Bits) -> Allowed:
        """Where nothing may come, a text is stuck, or was refused before: any distribution will do there, but there must be one."""
        bits[~bits.any(axis=1)] = -1
        return Allowed(
            np.concatenate(
                [np.arange(first, first + len(drafts) + 1) for first, _, drafts in found]
            ),
            bits,
        )
