"""The work of one round: the sequences that take part, and the messages to the workers."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from specserve.engine.sequence import Sequence
from specserve.types import Chunk, DraftStep, Proposal, Verdict, VerifyStep


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of verifying one sequence's proposal."""

    seq_id: int
    proposed: int
    accepted: int
    anticipated: bool | None = None

    @property
    def num_trials(self) -> int:
        """Draft tokens whose acceptance was decided: the accepted ones and the rejected one.

        Whether a draft token past a rejection would have been accepted is unknown.
        """
        return min(self.accepted + 1, self.proposed)


@dataclass(slots=True)
class BatchEntry:
    """One sequence in one round."""

    sequence: Sequence
    stop: int  # the target computes its committed tokens up to here
    needs_verdict: bool  # True if these are all of them, so that the round adds some
    gamma: int = 0  # draft tokens wanted after them
    next_gamma: int = 0  # the same after the verdict, for the next round
    # The drafter computes its committed tokens up to here; None: it gets no step.
    draft_stop: int | None = None
    proposal: Proposal | None = None


@dataclass(slots=True)
class Batch:
    """The entries of a round: decoding sequences, then chunks of prompts, both by arrival."""

    entries: list[BatchEntry] = field(default_factory=list)
    num_prompt_tokens: int = 0  # in chunks of prompts
    num_positions: int = 0  # in the target's pass, once the proposals are in
    num_caught_up: int = 0  # tokens that the drafter prefills beyond the newest of each entry
    awaits_grammars: bool = False  # the target may wait for one to be compiled

    @property
    def is_steady(self) -> bool:
        """True for a round of decoding alone.

        The seconds of other rounds do not say what a pass costs.
        """
        return (
            not self.num_prompt_tokens
            and self.num_caught_up <= len(self.entries)
            and not self.awaits_grammars
        )

    def draft_steps(self) -> list[DraftStep]:
        return [
            entry.sequence.draft_step(stop=entry.draft_stop, gamma=entry.gamma)
            for entry in self.entries
            if entry.draft_stop is not None
        ]

    def verify_steps(self, proposals: abc.Sequence[Proposal]) -> list[VerifyStep]:
        """Store the proposals in their entries and return a step for each entry.

        An entry without a proposal is verified without draft tokens.
        """
        by_id = {proposal.seq_id: proposal for proposal in proposals}
        for entry in self.entries:
            entry.proposal = by_id.get(entry.sequence.seq_id)
        steps = [
            entry.sequence.verify_step(
                stop=entry.stop, proposal=entry.proposal, next_gamma=entry.next_gamma
            )
            for entry in self.entries
        ]
        self.num_positions = sum(len(step.tokens) + len(step.drafts) for step in steps)
        return steps

    def with_verdicts(
        self, verdicts: abc.Sequence[Verdict]
    ) -> abc.Iterator[tuple[BatchEntry, Verdict]]:
        """Yield the entries on which was decided, each with its verdict."""
        entries = {entry.sequence.seq_id: entry for entry in self.entries if entry.needs_verdict}
        own = [verdict for verdict in verdicts if verdict.seq_id in entries]
        for entry, verdict in zip(entries.values(), own, strict=True):
            if verdict.is_decision:
                yield entry, verdict

    def outcomes(self, verdicts: abc.Sequence[Verdict]) -> tuple[Outcome, ...]:
        """Return the outcomes of the sequences that had a proposal."""
        return tuple(
            Outcome(
                verdict.seq_id,
                len(entry.proposal.tokens),
                verdict.accepted,
                entry.proposal.anticipated,
            )
            for entry, verdict in self.with_verdicts(verdicts)
            if entry.proposal and entry.proposal.tokens
        )

    @property
    def wanted_proposals(self) -> list[Proposal]:
        """Proposals of the entries that wanted draft tokens, also those without any."""
        return [
            entry.proposal for entry in self.entries if entry.gamma and entry.proposal is not None
        ]

    def commit(self, verdicts: abc.Sequence[Verdict], now: float = 0.0) -> list[Chunk]:
        """Commit the verdicts of `now`, advance the prefilled prompts, and return the chunks."""
        undecided = {verdict.seq_id: verdict for verdict in verdicts if not verdict.is_decision}
        chunks = []
        for entry in self.entries:
            sequence, verdict = entry.sequence, undecided.get(entry.sequence.seq_id)
            if not entry.needs_verdict:
                sequence.advance(stop=entry.stop, proposal=entry.proposal)
            elif verdict is not None:
                sequence.wait_for_grammar(entry.proposal)
            if verdict is not None and verdict.prompt_logprobs is not None:
                chunks.append(sequence.prompt_chunk(verdict))
        return chunks + [
            entry.sequence.commit(verdict, entry.proposal, now)
            for entry, verdict in self.with_verdicts(verdicts)
        ]


@dataclass(frozen=True, slots=True)
class DraftedBatch:
    """A batch that has its proposals and can be verified."""

    batch: Batch
    steps: abc.Sequence[VerifyStep]
    started_at: float
    drafted_at: float
