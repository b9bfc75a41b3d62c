"""One round's work: who takes part with how many tokens, and the messages that follow from it."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from specserve.engine.sequence import Sequence
from specserve.types import Chunk, DraftStep, Proposal, Verdict, VerifyStep


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sequence's proposal."""

    seq_id: int
    proposed: int
    accepted: int
    anticipated: bool | None = None

    @property
    def judged(self) -> int:
        """Whether a draft past a refusal would have been accepted is unknown."""
        return min(self.accepted + 1, self.proposed)


@dataclass(slots=True)
class Row:
    """One sequence in one round."""

    sequence: Sequence
    stop: int  # the target reads its committed tokens up to here
    decides: bool  # whether these are all of them, so that the round adds some
    gamma: int = 0  # draft tokens wanted behind them
    draft_stop: int | None = None  # the drafter reads up to here; None: it is left alone
    proposal: Proposal | None = None


@dataclass(slots=True)
class Batch:
    """The rows of a round: first those that decode, then the chunks of prompts, both in order of arrival."""

    rows: list[Row] = field(default_factory=list)
    num_prompt_tokens: int = 0  # in chunks of prompts
    num_rows: int = 0  # positions in the target's pass, once the proposals are in
    num_caught_up: int = 0  # tokens that the drafter reads beyond the newest of each row

    @property
    def is_steady(self) -> bool:
        """A round of decoding alone: the only kind whose seconds say what a pass costs."""
        return not self.num_prompt_tokens and self.num_caught_up <= len(self.rows)

    def draft_steps(self) -> list[DraftStep]:
        return [
            row.sequence.draft_step(stop=row.draft_stop, gamma=row.gamma)
            for row in self.rows
            if row.draft_stop is not None
        ]

    def verify_steps(self, proposals: abc.Sequence[Proposal]) -> list[VerifyStep]:
        """Takes the proposals into the rows; a row without one is verified without drafts."""
        by_id = {proposal.seq_id: proposal for proposal in proposals}
        for row in self.rows:
            row.proposal = by_id.get(row.sequence.seq_id)
        steps = [
            row.sequence.verify_step(stop=row.stop, proposal=row.proposal) for row in self.rows
        ]
        self.num_rows = sum(len(step.tokens) + len(step.drafts) for step in steps)
        return steps

    def pair(self, verdicts: abc.Sequence[Verdict]) -> abc.Iterator[tuple[Row, Verdict]]:
        """The rows that decide, each with its verdict."""
        return zip([row for row in self.rows if row.decides], verdicts, strict=True)

    def outcomes(self, verdicts: abc.Sequence[Verdict]) -> tuple[Outcome, ...]:
        """Of the sequences that had a proposal."""
        return tuple(
            Outcome(
                verdict.seq_id, len(row.proposal.tokens), verdict.accepted, row.proposal.anticipated
            )
            for row, verdict in self.pair(verdicts)
            if row.proposal and row.proposal.tokens
        )

    def commit(self, verdicts: abc.Sequence[Verdict]) -> list[Chunk]:
        """Every sequence takes what the round brought it."""
        for row in self.rows:
            if not row.decides:
                row.sequence.read(stop=row.stop, proposal=row.proposal)
        return [row.sequence.commit(verdict, row.proposal) for row, verdict in self.pair(verdicts)]
