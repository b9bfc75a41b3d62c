"""Acceptance in service: how many verified draft tokens the target accepts. Knows no model."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from specserve.types import DraftStep, Proposal

MEASURED_TOKENS = 2000
"""Verified draft tokens that a measurement of acceptance rests on, the latest."""
TOKENS_ALIKE = 8
"""Tokens of a text are accepted alike: so many say about as much as one that is independent."""


class AcceptanceWindow:
    """The latest verified draft tokens, and how many of them were accepted."""

    def __init__(self, num_tokens: int = MEASURED_TOKENS) -> None:
        self._limit = num_tokens
        self._rounds: deque[tuple[int, int]] = deque()
        self.num_verified = self.num_accepted = 0

    @property
    def is_full(self) -> bool:
        return self.num_verified >= self._limit

    @property
    def rate(self) -> float | None:
        """Accepted share of the verified tokens; None without any."""
        return self.num_accepted / self.num_verified if self.num_verified else None

    @property
    def variance(self) -> float:
        """Variance of the rate; with few tokens it is not 0."""
        rate = (self.num_accepted + 1) / (self.num_verified + 2)
        return rate * (1 - rate) * TOKENS_ALIKE / max(1, self.num_verified)

    def add(self, accepted: int, verified: int) -> None:
        self._rounds.append((accepted, verified))
        self.num_accepted += accepted
        self.num_verified += verified
        while self.num_verified - self._rounds[0][1] >= self._limit:
            accepted, verified = self._rounds.popleft()
            self.num_accepted -= accepted
            self.num_verified -= verified

    def fell_from(self, earlier: AcceptanceWindow, *, num_errors: float) -> bool:
        """Return whether the rate is clearly, by so many standard errors, below an earlier one."""
        if self.rate is None or earlier.rate is None:
            return False
        error = math.sqrt(self.variance + earlier.variance)
        return self.rate < earlier.rate - num_errors * error


class PendingProposals:
    """The last proposal of each sequence; the next step implies how much of it was accepted.

    A step does not repeat the accepted draft tokens that the drafter has cached.
    """

    def __init__(self) -> None:
        self._proposals: dict[int, Proposal] = {}
        self._uncounted: set[int] = set()

    def take(self, step: DraftStep) -> tuple[DraftStep, tuple[int, int] | None]:
        """Return the step with the accepted draft tokens before it, and what was accepted.

        That is how many draft tokens were accepted, and of how many verified ones; None if it is
        not known, or not to be counted.
        """
        is_counted = step.seq_id not in self._uncounted
        self._uncounted.discard(step.seq_id)
        proposal = self._proposals.pop(step.seq_id, None)
        if proposal is None:
            return step, None
        start, num_drafts, first = proposal.start, len(proposal.tokens), step.start
        accepted = step.stop - start - 1
        if not 0 <= accepted <= num_drafts:
            return step, None
        if step.start > start:
            known = proposal.tokens[: step.start - start]
            step = replace(step, start=start, tokens=known + step.tokens)
        # A step from further back comes of a round that went on without the proposal.
        is_counted &= start <= first
        return step, (accepted, min(accepted + 1, num_drafts)) if is_counted else None

    def add(self, proposals: Sequence[Proposal]) -> None:
        self._proposals.update(
            {proposal.seq_id: proposal for proposal in proposals if proposal.tokens}
        )

    def discount(self) -> None:
        """Leave the proposals of now uncounted: other weights have drawn them."""
        self._uncounted = set(self._proposals)

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._proposals.pop(seq_id, None)
            self._uncounted.discard(seq_id)
