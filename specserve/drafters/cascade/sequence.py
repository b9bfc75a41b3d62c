"""A text that the stages of a cascade write on together. Knows how far each has read it, and nothing of what they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specserve.drafters.ranking import mode
from specserve.grammar.sequences import Guessed, Rule
from specserve.sampling.drafts import supports
from specserve.sampling.noise import stage_seed
from specserve.types import DraftStep, Grammar, Policy, Proposal, SparseRows, Step

Law = SparseRows | None  # what one token was drawn from, a single row; None: it was certain


class Manuscript:
    """One sequence, or a branch of one: what is committed, and behind it what was drafted, each token with its law."""

    __slots__ = (
        "grammar",
        "is_branch",
        "laws",
        "learnt",
        "policy",
        "read",
        "seq_id",
        "source",
        "start",
        "tokens",
    )

    def __init__(self, seq_id: int, policy: Policy, *, num_stages: int) -> None:
        self.seq_id, self.policy = seq_id, policy
        self.source: tuple[int, ...] = ()  # what an encoder reads of it
        self.grammar: Grammar | None = None
        self.tokens: list[int] = []
        self.start = 0  # length of what is committed, by which the round is named
        self.laws: list[Law] = []  # of the tokens behind it
        self.read = [0] * num_stages  # positions of this very text that each stage holds
        self.learnt = 0  # tokens of it that tables have learnt from
        self.is_branch = False

    def __len__(self) -> int:
        return len(self.tokens)

    def continues(self, step: DraftStep) -> bool:
        """Whether the step asks for what has been begun here."""
        return (
            bool(self.laws)
            and self.start == stop_of(step)
            and self.tokens[step.start : self.start] == list(step.tokens)
        )

    def commit(self, step: DraftStep) -> None:
        """Whatever stands past its start gives way to its tokens."""
        self.laws = []
        self.cut(step.start)
        self.tokens += step.tokens
        self.source, self.grammar = (
            (self.source, self.grammar) if step.start else (step.source, step.grammar)
        )
        self.start, self.policy = len(self.tokens), step.policy

    def add(self, tokens: Sequence[int], laws: Sequence[Law]) -> None:
        self.tokens += tokens
        self.laws += laws

    def cut(self, length: int) -> None:
        """What lies past it was not so; no stage holds it any more."""
        del self.tokens[length:], self.laws[max(length - self.start, 0) :]
        self.read = [min(read, length) for read in self.read]

    def unread(self, stage: int, *, before: int) -> Step:
        """What the stage must read, the token before `before` at least: it decides what follows."""
        start = min(self.read[stage], before - 1)
        return Step(self.seq_id, start, tuple(self.tokens[start:]), () if start else self.source)

    def asked(self, stage: int, gamma: int) -> DraftStep:
        """The same, as a question for `gamma` more."""
        step = self.unread(stage, before=len(self.tokens))
        return DraftStep(
            self.seq_id,
            step.start,
            step.tokens,
            gamma,
            self.policy_of(stage),
            step.source,
            None if step.start else self.grammar,
        )

    def guessed(self, mark: int) -> Guessed:
        """What stands behind a mark, under the grammar if there is one."""
        rule = None if self.grammar is None else Rule(self.grammar, self.policy.prompt_length)
        return Guessed(self.seq_id, rule, tuple(self.tokens[:mark]), tuple(self.tokens[mark:]))

    def policy_of(self, stage: int) -> Policy:
        """Its draws are its own, another stage's and the target's are others. But coupled ones are the target's."""
        if mode(self.policy) != "sampled":
            return self.policy
        return replace(self.policy, seed=stage_seed(self.policy.seed, self.start, stage))

    def forked(self, as_id: int, length: int) -> Manuscript:
        branch = Manuscript(as_id, self.policy, num_stages=len(self.read))
        branch.tokens, branch.start, branch.source, branch.grammar = (
            self.tokens[:length],
            length,
            self.source,
            self.grammar,
        )
        branch.learnt, branch.is_branch = self.learnt, True
        return branch

    def proposal(self, gamma: int) -> Proposal:
        """All of it is held: what a stage has not read yet is read to it when it is asked."""
        drafts = tuple(self.tokens[self.start : self.start + gamma])
        q = (
            together(drafts, self.laws[:gamma])
            if drafts and mode(self.policy) == "sampled"
            else None
        )
        return Proposal(self.seq_id, self.start, drafts, q, self.start + len(drafts))


def stop_of(step: DraftStep) -> int:
    return step.start + len(step.tokens)


def laws_of(proposal: Proposal) -> list[Law]:
    q = proposal.q
    if q is None:
        return [None] * len(proposal.tokens)
    return [SparseRows(q.ids[i : i + 1], q.probs[i : i + 1]) for i in range(len(proposal.tokens))]


def together(tokens: Sequence[int], laws: Sequence[Law]) -> SparseRows | None:
    """As rows of one width, a certain token's being all its own; None if all were certain."""
    if all(law is None for law in laws):
        return None
    return SparseRows(
        *supports(np.array(tokens, dtype=np.int64), np.ones(len(tokens), np.int64), laws)
    )
