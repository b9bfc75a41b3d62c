"""Who writes on manuscripts: a drafter by itself, a larger one that reviews what smaller ones wrote, several in turn. Knows no config.

Writers nest: what a reviewer reviews, another reviewer may have written (2312.11462, Algorithm 1). All sequences go through each pass together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

from specserve.drafters.base import Forks
from specserve.drafters.cascade.review import Guesses, Opinion, review
from specserve.drafters.cascade.sequence import Manuscript, laws_of
from specserve.drafters.neural.drafter import NeuralDrafter


@dataclass(frozen=True, slots=True)
class Ask:
    """Text is wanted behind `base`, up to the length `goal`."""

    script: Manuscript
    base: int
    goal: int

    @property
    def lacks(self) -> int:
        return max(self.goal - len(self.script), 0)


class Stage(Forks, Protocol):
    """A drafter as a part of a cascade."""

    def held(self, seq_id: int) -> int: ...


class Tally:
    """How many passes each stage has made."""

    def __init__(self, num_stages: int) -> None:
        self.passes = [0] * num_stages


class Writer(Protocol):
    def write(self, asks: Sequence[Ask], enough: Callable[[], bool]) -> None:
        """Up to each goal, or less where nothing more is known. `enough` ends it where it can be gone on with later as if nothing had been."""
        ...


class Alone:
    """A stage that drafts by itself."""

    def __init__(self, number: int, drafter: Stage, tally: Tally) -> None:
        self._number, self._drafter, self._tally = number, drafter, tally

    def write(self, asks: Sequence[Ask], enough: Callable[[], bool]) -> None:
        """In one go: drafts are drawn with noise that is named by where they begin."""
        asks = [ask for ask in asks if ask.lacks]
        if not asks:
            return
        steps = [ask.script.asked(self._number, ask.lacks) for ask in asks]
        proposals = self._drafter.draft(steps, bool)
        for ask, proposal in zip(asks, proposals, strict=True):
            ask.script.add(proposal.tokens, laws_of(proposal))
            ask.script.read[self._number] = min(proposal.held, len(ask.script))
        self._tally.passes[self._number] += max(len(proposal.tokens) for proposal in proposals)


class Reviewer:
    """A stage that lets others guess, and judges the guesses of all sequences in one pass. What it proposes is its own text."""

    def __init__(
        self, number: int, drafter: NeuralDrafter, below: Writer, tally: Tally, *, lenience: float
    ) -> None:
        self._number, self._drafter, self._below, self._tally, self._lenience = (
            number,
            drafter,
            below,
            tally,
            lenience,
        )

    def write(self, asks: Sequence[Ask], enough: Callable[[], bool]) -> None:
        """A review adds a token to those that stand, so no more are asked for than one less than is wanted."""
        while asks := [ask for ask in asks if ask.lacks]:
            marks = [len(ask.script) for ask in asks]
            self._below.write(
                [
                    Ask(ask.script, mark, ask.goal - 1)
                    for ask, mark in zip(asks, marks, strict=True)
                ],
                bool,
            )
            asks = self._reviewed(asks, marks)
            if enough():
                return

    def _reviewed(self, asks: Sequence[Ask], marks: Sequence[int]) -> list[Ask]:
        """Those that there was room for. Of the others all guesses go, which are the text behind a mark."""
        steps = [
            ask.script.unread(self._number, before=mark)
            for ask, mark in zip(asks, marks, strict=True)
        ]
        fit = self._drafter.fitting(steps)
        for ask, mark, fits in zip(asks, marks, fit, strict=True):
            if not fits:
                ask.script.cut(mark)
        going = list(compress(zip(asks, marks, steps, strict=True), fit))
        if going:
            logits = self._drafter.read(
                [step for *_, step in going], [len(ask.script) - mark + 1 for ask, mark, _ in going]
            )
            logits = self._drafter.parses.allowed(
                [ask.script.guessed(mark) for ask, mark, _ in going]
            ).applied(logits)
            guesses = [self._guesses(ask.script, mark) for ask, mark, _ in going]
            opinions = review(
                logits, guesses, support=self._drafter.support, lenience=self._lenience
            )
            for (ask, mark, _), opinion in zip(going, opinions, strict=True):
                self._take(ask.script, mark, opinion)
            self._tally.passes[self._number] += 1
        return [ask for ask, *_ in going]

    def _guesses(self, script: Manuscript, mark: int) -> Guesses:
        return Guesses(
            mark,
            tuple(script.tokens[mark:]),
            script.laws[mark - script.start :],
            script.policy_of(self._number),
            self._drafter.history(script.seq_id, mark, script.policy),
        )

    def _take(self, script: Manuscript, mark: int, opinion: Opinion) -> None:
        stand = mark + opinion.accepted
        script.read[self._number] = len(script)
        script.cut(stand)
        script.laws[mark - script.start :] = opinion.laws[:-1]
        script.add([opinion.next_token], opinion.laws[-1:])


@dataclass(frozen=True, slots=True)
class Turn:
    """A writer, and how many tokens it and those before it may write; None: as many as are wanted."""

    writer: Writer
    upto: int | None


class Relay:
    """The larger writers first, smaller ones for the later positions. Where one knows nothing, the next takes over."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns

    def write(self, asks: Sequence[Ask], enough: Callable[[], bool]) -> None:
        for turn in self._turns:
            own = [Ask(ask.script, ask.base, _goal(ask, turn)) for ask in asks]
            if any(ask.lacks for ask in own):
                turn.writer.write(own, enough)
                if enough():
                    return


def _goal(ask: Ask, turn: Turn) -> int:
    return ask.goal if turn.upto is None else min(ask.goal, ask.base + turn.upto)
