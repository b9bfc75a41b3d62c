"""Drafters without a model: what followed before will follow again, by counts or by copying.

Knows no target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specserve.drafters.base import OutcomeForecast, never, trim_to_grammar
from specserve.drafters.ngram.forkable_text import ForkableText, PlainText, TextBuffer
from specserve.drafters.ngram.sampler import TableSampler
from specserve.drafters.ngram.suffix_index import SuffixIndex
from specserve.drafters.ngram.tables import Table, TrainableTable
from specserve.grammar.matcher import GrammarCompiler
from specserve.grammar.sequences import GrammarStates
from specserve.types import DraftStep, Proposal, SparseDistribution

MIN_MATCH = 2
"""Tokens that must match before what followed is copied; bigrams are counted for a single one."""
MAX_CONTEXT = 2**31 - 1
"""Positions; noise is keyed by no more."""


@dataclass(slots=True)
class NgramSequence:
    """The text of a sequence or a branch, with the last draft tokens at its end.

    The text begins with the encoder input, if there is one.
    """

    text: ForkableText
    step: DraftStep
    """The last step of the sequence."""
    num_encoder_tokens: int = 0
    """Tokens that are copied from as well, and are no part of the sequence's positions."""
    drafts: tuple[int, ...] = ()
    num_learned: int = 0
    """Tokens that a table has learned from."""
    is_branch: bool = False

    @property
    def num_cached(self) -> int:
        """Positions that are known, draft tokens included."""
        return len(self.text) - self.num_encoder_tokens

    def write(self, start: int, tokens: Sequence[int]) -> None:
        self.text.write(self.num_encoder_tokens + start, tokens)

    def committed(self) -> TextBuffer:
        """Return the committed tokens, after the encoder input."""
        return self.text.prefix(self.num_encoder_tokens + self.step.stop)


class NgramDrafter:
    """A drafter that copies, if `copies`, and else draws from the table, if there is one.

    It copies what followed the longest earlier match of the text's end. Copied tokens are certain
    (q is None), and so are drawn ones in greedy sequences. Implements `base.ForkableDrafter`. A
    proposal takes microseconds, so none is ever interrupted: `should_stop` is not called.
    """

    def __init__(
        self,
        *,
        copies: bool = False,
        table: Table | None = None,
        learner: TrainableTable | None = None,
        context: int = MAX_CONTEXT,
        grammar_compiler: GrammarCompiler | None = None,
    ) -> None:
        self.context = context
        self._grammar_states = GrammarStates(grammar_compiler)
        self._copies = copies
        self._sampler = None if table is None else TableSampler(table)
        self._learner = learner
        self._sequences: dict[int, NgramSequence] = {}

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        return self.draft(steps, never)

    def draft(
        self, steps: Sequence[DraftStep], should_stop: Callable[[], bool]
    ) -> Sequence[Proposal]:
        """Copy where there is a match, and draw for the other sequences, all at once.

        A step that leaves a gap gets an empty proposal.
        """
        self._grammar_states.register(steps)
        sequences = {
            step.seq_id: self._commit(step)
            for step in steps
            if self.num_cached(step.seq_id) >= step.start
        }
        q = self._draw(
            [
                sequence
                for sequence in sequences.values()
                if sequence.step.gamma and not sequence.drafts
            ]
        )
        for seq_id, sequence in sequences.items():
            matcher = (
                self._grammar_states.advance(sequence.step, self._known_tokens)
                if sequence.step.gamma
                else None
            )
            if matcher is not None:
                sequence.drafts, q[seq_id] = trim_to_grammar(
                    matcher, sequence.step, sequence.drafts, q.get(seq_id)
                )
        return [
            self._proposal(step, sequences.get(step.seq_id), q.get(step.seq_id)) for step in steps
        ]

    def release(self, seq_ids: Sequence[int]) -> None:
        self._grammar_states.release(seq_ids)
        for seq_id in seq_ids:
            self._drop(seq_id)

    def forecast_outcomes(
        self,
        seq_ids: Sequence[int],
        width: int,
        undrafted: Sequence[DraftStep] = (),
        extra_steps: Sequence[DraftStep] = (),
    ) -> Sequence[OutcomeForecast]:
        sequences = {seq_id: self._sequences[seq_id] for seq_id in seq_ids} | {
            step.seq_id: self._commit(replace(step, gamma=0))
            for step in undrafted
            if self.num_cached(step.seq_id) >= step.start
        }
        return [self._forecast(seq_id, sequence, width) for seq_id, sequence in sequences.items()]

    def fork(self, seq_id: int, branch_id: int, length: int) -> bool:
        sequence = self._sequences[seq_id]
        text = sequence.text.fork(sequence.num_encoder_tokens + length)
        self._sequences[branch_id] = NgramSequence(
            text,
            sequence.step,
            sequence.num_encoder_tokens,
            num_learned=sequence.num_learned,
            is_branch=True,
        )
        self._grammar_states.fork(seq_id, branch_id, length)
        return True

    def promote_branch(self, seq_id: int, branch_id: int) -> None:
        self._grammar_states.promote_branch(seq_id, branch_id)
        self._drop(seq_id)
        branch = self._sequences[seq_id] = self._sequences.pop(branch_id)
        branch.is_branch = False

    def num_cached(self, seq_id: int) -> int:
        """Return the number of known positions of the sequence, draft tokens included."""
        sequence = self._sequences.get(seq_id)
        return 0 if sequence is None else sequence.num_cached

    def _drop(self, seq_id: int) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            sequence.text.release()

    def _known_tokens(self, seq_id: int) -> Sequence[int]:
        sequence = self._sequences[seq_id]
        return sequence.committed().tokens[sequence.num_encoder_tokens :]

    def _commit(self, step: DraftStep) -> NgramSequence:
        """Write the step's tokens, learn from them, and copy draft tokens if there is a match."""
        sequence = self._sequences.get(step.seq_id)
        if sequence is None:
            sequence = self._sequences[step.seq_id] = NgramSequence(
                ForkableText(SuffixIndex if self._copies else PlainText), step
            )
        sequence.step = step
        if step.encoder_input:
            sequence.num_encoder_tokens = len(step.encoder_input)
            sequence.text.write(0, step.encoder_input)
        sequence.write(step.start, step.tokens)
        text = sequence.committed()
        if self._learner is not None and not sequence.is_branch:
            _learn(sequence, text.tokens, self._learner)
        sequence.drafts = _copy(text, step.gamma) if isinstance(text, SuffixIndex) else ()
        return sequence

    def _draw(self, sequences: Sequence[NgramSequence]) -> dict[int, SparseDistribution | None]:
        """Draw draft tokens for the sequences, and return each one's q by its id."""
        if self._sampler is None or not sequences:
            return {}
        drafts = self._sampler.draw([sequence.step for sequence in sequences])
        for sequence, draft in zip(sequences, drafts, strict=True):
            sequence.drafts = tuple(draft.tokens)
        return {
            sequence.step.seq_id: draft.distribution()
            for sequence, draft in zip(sequences, drafts, strict=True)
        }

    def _proposal(
        self, step: DraftStep, sequence: NgramSequence | None, q: SparseDistribution | None
    ) -> Proposal:
        """Return the proposal, and keep its tokens: accepted ones need not be sent again."""
        if sequence is None:
            return Proposal(step.seq_id, step.stop, (), None, self.num_cached(step.seq_id))
        sequence.write(step.stop, sequence.drafts)
        return Proposal(step.seq_id, step.stop, sequence.drafts, q, sequence.num_cached)

    def _forecast(self, seq_id: int, sequence: NgramSequence, width: int) -> OutcomeForecast:
        text, drafts = sequence.committed(), sequence.drafts
        likely = (
            _next_tokens(text, drafts, width + 1)
            if isinstance(text, SuffixIndex)
            else [[]] * (len(drafts) + 1)
        )
        start = sequence.step.stop
        if self._sampler is not None:
            before = (sequence.step.tokens[-1], *drafts)
            drawn = self._sampler.rank_next_tokens(sequence.step.policy, start, before, width + 1)
            likely = [[*first, *second] for first, second in zip(likely, drawn, strict=True)]
        rejected = (*drafts, None)
        next_tokens = tuple(
            tuple(token for token in dict.fromkeys(tokens) if token != draft)[:width]
            for tokens, draft in zip(likely, rejected, strict=True)
        )
        return OutcomeForecast(seq_id, start, drafts, next_tokens)


def _learn(sequence: NgramSequence, tokens: Sequence[int], learner: TrainableTable) -> None:
    """Learn from committed tokens once. A branch's tokens may never be committed."""
    if len(tokens) > sequence.num_learned:
        learner.learn(tokens[max(sequence.num_learned - 1, 0) :])
        sequence.num_learned = len(tokens)


def _copy(index: SuffixIndex, gamma: int) -> tuple[int, ...]:
    match = index.match() if gamma else None
    return () if match is None or match.length < MIN_MATCH else index.continuation(match, gamma)


def _next_tokens(index: SuffixIndex, drafts: Sequence[int], width: int) -> list[list[int]]:
    """Return the tokens that may come at each position, by what followed similar endings.

    The draft tokens are appended to the text meanwhile.
    """
    found = [index.next_tokens(width)]
    length = len(index.tokens)
    for draft in drafts:
        index.extend([draft])
        found.append(index.next_tokens(width))
    index.truncate(length)
    return found
