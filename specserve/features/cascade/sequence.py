"""A sequence that the stages of a cascade extend together.

Knows how many of its positions each stage has cached, and nothing of what the stages are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specserve.drafters.ranking import draw_mode
from specserve.grammar.sequences import DraftedSequence, SequenceGrammar
from specserve.sampling.drafts import supports
from specserve.sampling.noise import stage_seed
from specserve.types import DraftStep, Grammar, Policy, Proposal, SparseDistribution, Step

TokenProbs = SparseDistribution | None
"""Draft distribution of one token, a single row; None: the token was certain."""


class CascadeSequence:
    """The committed tokens of a sequence or a branch, and after them its draft tokens with q."""

    __slots__ = (
        "draft_probs",
        "encoder_input",
        "grammar",
        "is_branch",
        "num_cached",
        "num_learned",
        "policy",
        "seq_id",
        "start",
        "tokens",
    )

    def __init__(self, seq_id: int, policy: Policy, *, num_stages: int) -> None:
        self.seq_id, self.policy = seq_id, policy
        self.encoder_input: tuple[int, ...] = ()
        self.grammar: Grammar | None = None
        self.tokens: list[int] = []
        # Number of committed tokens, by which the round is identified.
        self.start = 0
        # Of the tokens after `start`.
        self.draft_probs: list[TokenProbs] = []
        # Positions of this text that each stage has cached.
        self.num_cached = [0] * num_stages
        # Tokens that a table has learned from.
        self.num_learned = 0
        self.is_branch = False

    def __len__(self) -> int:
        return len(self.tokens)

    def can_resume(self, step: DraftStep) -> bool:
        """Return whether the draft tokens here are those that the step asks for."""
        return (
            bool(self.draft_probs)
            and self.start == step.stop
            and self.tokens[step.start : self.start] == list(step.tokens)
        )

    def commit(self, step: DraftStep) -> None:
        """Truncate the text to the step's start and append the step's tokens."""
        self.draft_probs = []
        self.truncate(step.start)
        self.tokens += step.tokens
        self.encoder_input, self.grammar = (
            (self.encoder_input, self.grammar) if step.start else (step.encoder_input, step.grammar)
        )
        self.start, self.policy = len(self.tokens), step.policy

    def append(self, tokens: Sequence[int], draft_probs: Sequence[TokenProbs]) -> None:
        self.tokens += tokens
        self.draft_probs += draft_probs

    def truncate(self, length: int) -> None:
        """Drop the tokens past `length`, which no stage has cached from now on."""
        del self.tokens[length:], self.draft_probs[max(length - self.start, 0) :]
        self.num_cached = [min(cached, length) for cached in self.num_cached]

    def missing_step(self, stage: int, *, before: int) -> Step:
        """Return the step that writes what the stage has not cached.

        It includes at least the token before `before`, which decides what follows.
        """
        start = min(self.num_cached[stage], before - 1)
        return Step(
            self.seq_id,
            start,
            tuple(self.tokens[start:]),
            () if start else self.encoder_input,
            self.policy.cache_salt,
        )

    def draft_step(self, stage: int, gamma: int) -> DraftStep:
        """Return the step that writes what the stage has not cached and asks for `gamma` more."""
        step = self.missing_step(stage, before=len(self.tokens))
        return DraftStep(
            self.seq_id,
            step.start,
            step.tokens,
            gamma,
            self.stage_policy(stage),
            step.encoder_input,
            None if step.start else self.grammar,
        )

    def drafted_sequence(self, length: int) -> DraftedSequence:
        """Return the text with the tokens past `length` as draft tokens, and its grammar."""
        grammar = (
            None
            if self.grammar is None
            else SequenceGrammar(self.grammar, self.policy.prompt_length)
        )
        return DraftedSequence(
            self.seq_id, grammar, tuple(self.tokens[:length]), tuple(self.tokens[length:])
        )

    def stage_policy(self, stage: int) -> Policy:
        """Return the policy of a stage's draws.

        A stage has a seed of its own, so its draws differ from other stages' and the target's.
        Coupled draws are the target's own.
        """
        if draw_mode(self.policy) != "sampled":
            return self.policy
        return replace(self.policy, seed=stage_seed(self.policy.seed, self.start, stage))

    def fork(self, branch_id: int, length: int) -> CascadeSequence:
        """Return a branch with the first `length` tokens, which no stage has cached."""
        branch = CascadeSequence(branch_id, self.policy, num_stages=len(self.num_cached))
        branch.tokens, branch.start, branch.encoder_input, branch.grammar = (
            self.tokens[:length],
            length,
            self.encoder_input,
            self.grammar,
        )
        branch.num_learned, branch.is_branch = self.num_learned, True
        return branch

    def proposal(self, gamma: int) -> Proposal:
        """Return up to `gamma` draft tokens as a proposal.

        It says that all of them are cached: a stage is prefilled with the tokens that it lacks
        before it is used.
        """
        drafts = tuple(self.tokens[self.start : self.start + gamma])
        q = (
            stack_probs(drafts, self.draft_probs[:gamma])
            if drafts and draw_mode(self.policy) == "sampled"
            else None
        )
        return Proposal(self.seq_id, self.start, drafts, q, self.start + len(drafts))


def split_probs(proposal: Proposal) -> list[TokenProbs]:
    """Return the draft distribution of each token of the proposal."""
    q = proposal.q
    if q is None:
        return [None] * len(proposal.tokens)
    return [
        SparseDistribution(q.ids[i : i + 1], q.probs[i : i + 1])
        for i in range(len(proposal.tokens))
    ]


def stack_probs(
    tokens: Sequence[int], draft_probs: Sequence[TokenProbs]
) -> SparseDistribution | None:
    """Return q with rows of one width, one-hot for certain tokens; None if all were certain."""
    if all(probs is None for probs in draft_probs):
        return None
    return SparseDistribution(
        *supports(np.array(tokens, dtype=np.int64), np.ones(len(tokens), np.int64), draft_probs)
    )
