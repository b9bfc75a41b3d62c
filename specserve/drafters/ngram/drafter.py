"""Drafters without a model: what followed before will follow again. By counts, by copying, or by both. Knows no target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specserve.drafters.base import Outlook
from specserve.drafters.grammar_trim import lawful
from specserve.drafters.ngram.forkable_text import Plain, Strand, Written
from specserve.drafters.ngram.sampler import Sampler
from specserve.drafters.ngram.suffix_index import Endings
from specserve.drafters.ngram.tables import Table
from specserve.grammar.matcher import Grammars
from specserve.grammar.sequences import Parses
from specserve.types import DraftStep, Proposal, SparseRows

SHORTEST = 2  # tokens that must agree before what followed is copied: a single one is what bigrams are counted for
UNBOUNDED = 2**31 - 1  # positions; noise is keyed by no more
NOTHING: tuple[int, ...] = ()


class Learns(Table, Protocol):
    """A table that follows the texts that pass by."""

    def learn(self, tokens: Sequence[int]) -> None: ...


@dataclass(slots=True)
class Followed:
    """A sequence, or a branch of one: its text with the last drafts behind it, and the source of an encoder-decoder in front."""

    strand: Strand
    step: DraftStep  # the last
    lead: int = (
        0  # tokens of the source: what is copied from as well, and no part of the text's positions
    )
    drafts: tuple[int, ...] = ()
    learnt: int = 0  # tokens of it that were learnt from
    is_branch: bool = False

    @property
    def stop(self) -> int:
        """Where the drafts begin."""
        return self.step.start + len(self.step.tokens)

    @property
    def held(self) -> int:
        """Positions of the text that are known, drafts included."""
        return len(self.strand) - self.lead

    def write(self, start: int, tokens: Sequence[int]) -> None:
        self.strand.write(self.lead + start, tokens)

    def text(self) -> Written:
        """All that is committed."""
        return self.strand.text(self.lead + self.stop)


class StatisticalDrafter:
    """Copies what followed the longest earlier ending like the text's own, if `copies`; else draws from the table, if there is one.

    What it copies is certain (q is None); what it draws is certain in greedy sequences. Implements `base.Forks`. A proposal takes
    microseconds, so none is ever begun and left: `enough` is not asked.
    """

    def __init__(
        self,
        *,
        copies: bool = False,
        table: Table | None = None,
        learner: Learns | None = None,
        context: int = UNBOUNDED,
        grammars: Grammars | None = None,
    ) -> None:
        self.context = context
        self._parses = Parses(grammars)
        self._copies = copies
        self._sampler = None if table is None else Sampler(table)
        self._learner = learner
        self._followed: dict[int, Followed] = {}

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        return self.draft(steps, bool)

    def draft(self, steps: Sequence[DraftStep], enough: Callable[[], bool]) -> Sequence[Proposal]:
        """Copies where there is something to copy; draws for the others, all at once. A step that leaves a gap gets an empty proposal."""
        self._parses.meet(steps)
        able = {
            step.seq_id: self._read(step) for step in steps if self.held(step.seq_id) >= step.start
        }
        q = self._draw(
            [followed for followed in able.values() if followed.step.gamma and not followed.drafts]
        )
        for seq_id, followed in able.items():
            parse = self._parses.follow(followed.step, self._known) if followed.step.gamma else None
            if parse is not None:
                followed.drafts, q[seq_id] = lawful(
                    parse, followed.step, followed.drafts, q.get(seq_id)
                )
        return [self._proposal(step, able.get(step.seq_id), q.get(step.seq_id)) for step in steps]

    def release(self, seq_ids: Sequence[int]) -> None:
        self._parses.release(seq_ids)
        for seq_id in seq_ids:
            self._drop(seq_id)

    def outlooks(self, seq_ids: Sequence[int], width: int) -> Sequence[Outlook]:
        return [self._outlook(seq_id, self._followed[seq_id], width) for seq_id in seq_ids]

    def fork(self, seq_id: int, as_id: int, length: int) -> bool:
        followed = self._followed[seq_id]
        strand = followed.strand.fork(followed.lead + length)
        self._followed[as_id] = Followed(
            strand, followed.step, followed.lead, learnt=followed.learnt, is_branch=True
        )
        self._parses.fork(seq_id, as_id, length)
        return True

    def become(self, seq_id: int, branch_id: int) -> None:
        self._parses.become(seq_id, branch_id)
        self._drop(seq_id)
        branch = self._followed[seq_id] = self._followed.pop(branch_id)
        branch.is_branch = False

    def held(self, seq_id: int) -> int:
        """Positions of it that are known, drafts included."""
        followed = self._followed.get(seq_id)
        return 0 if followed is None else followed.held

    def _drop(self, seq_id: int) -> None:
        followed = self._followed.pop(seq_id, None)
        if followed is not None:
            followed.strand.release()

    def _known(self, seq_id: int) -> Sequence[int]:
        followed = self._followed[seq_id]
        return followed.text().tokens[followed.lead :]

    def _read(self, step: DraftStep) -> Followed:
        followed = self._followed.get(step.seq_id)
        if followed is None:
            followed = self._followed[step.seq_id] = Followed(
                Strand(Endings if self._copies else Plain), step
            )
        followed.step = step
        if step.source:
            followed.lead = len(step.source)
            followed.strand.write(0, step.source)
        followed.write(step.start, step.tokens)
        text = followed.text()
        if self._learner is not None and not followed.is_branch:
            _learn(followed, text.tokens, self._learner)
        followed.drafts = _copied(text, step.gamma) if isinstance(text, Endings) else NOTHING
        return followed

    def _draw(self, wanting: Sequence[Followed]) -> dict[int, SparseRows | None]:
        """What was drawn from, by sequence."""
        if self._sampler is None or not wanting:
            return {}
        guesses = self._sampler.guesses([followed.step for followed in wanting])
        for followed, guess in zip(wanting, guesses, strict=True):
            followed.drafts = tuple(guess.tokens)
        return {
            followed.step.seq_id: guess.q()
            for followed, guess in zip(wanting, guesses, strict=True)
        }

    def _proposal(
        self, step: DraftStep, followed: Followed | None, q: SparseRows | None
    ) -> Proposal:
        """Drafts are held, too: those that are accepted need not be told again."""
        stop = step.start + len(step.tokens)
        if followed is None:
            return Proposal(step.seq_id, stop, NOTHING, None, self.held(step.seq_id))
        followed.write(stop, followed.drafts)
        return Proposal(step.seq_id, stop, followed.drafts, q, followed.held)

    def _outlook(self, seq_id: int, followed: Followed, width: int) -> Outlook:
        text = followed.text()
        likely = (
            _nexts(text, followed.drafts, width + 1)
            if isinstance(text, Endings)
            else [[]] * (len(followed.drafts) + 1)
        )
        if self._sampler is not None:
            before = (followed.step.tokens[-1], *followed.drafts)
            drawn = self._sampler.likely(followed.step.policy, followed.stop, before, width + 1)
            likely = [[*first, *second] for first, second in zip(likely, drawn, strict=True)]
        refused = (*followed.drafts, None)
        nexts = tuple(
            _distinct(tokens, no, width) for tokens, no in zip(likely, refused, strict=True)
        )
        return Outlook(seq_id, followed.stop, followed.drafts, nexts)


def _learn(followed: Followed, tokens: Sequence[int], learner: Learns) -> None:
    """From what is committed and has not been learnt from: what a branch was drafted for may never be."""
    if len(tokens) > followed.learnt:
        learner.learn(tokens[max(followed.learnt - 1, 0) :])
        followed.learnt = len(tokens)


def _copied(endings: Endings, gamma: int) -> tuple[int, ...]:
    match = endings.match() if gamma else None
    return NOTHING if match is None or match.length < SHORTEST else endings.copied(match, gamma)


def _nexts(endings: Endings, drafts: Sequence[int], width: int) -> list[list[int]]:
    """What may come at each stop, by how the text went on after endings like that one. The drafts are laid on for as long as this takes."""
    found = [endings.nexts(width)]
    length = len(endings.tokens)
    for draft in drafts:
        endings.extend([draft])
        found.append(endings.nexts(width))
    endings.truncate(length)
    return found


def _distinct(tokens: Sequence[int], refused: int | None, width: int) -> tuple[int, ...]:
    """The first `width` of them, each once."""
    return tuple(token for token in dict.fromkeys(tokens) if token != refused)[:width]
