"""The nodes of a cascade: a drafter alone, one that reviews smaller ones, several in turn.

Knows no config.

Nodes nest: another reviewing stage may have drafted what a stage reviews (2312.11462, Algorithm 1).
All sequences go through each pass together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Protocol

from specserve.drafters.base import ForkableDrafter, never
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.features.cascade.review import ReviewRequest, ReviewResult, review
from specserve.features.cascade.sequence import CascadeSequence, split_probs


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request for tokens after the first `base`, up to the length `stop`."""

    sequence: CascadeSequence
    base: int
    stop: int

    @property
    def num_missing(self) -> int:
        return max(self.stop - len(self.sequence), 0)


class StageDrafter(ForkableDrafter, Protocol):
    """A drafter as a part of a cascade."""

    def num_cached(self, seq_id: int) -> int: ...


class PassCounter:
    """Number of passes of each stage."""

    def __init__(self, num_stages: int) -> None:
        self.passes = [0] * num_stages


class StageNode(Protocol):
    """A stage, or several, that extend sequences."""

    def extend(self, requests: Sequence[DraftRequest], should_stop: Callable[[], bool]) -> None:
        """Extend each sequence to its stop, or less far where no token is known.

        `should_stop` ends it only where a later call can continue as if there had been no break.
        """
        ...


class LeafStage:
    """A stage that drafts alone."""

    def __init__(self, number: int, drafter: StageDrafter, counter: PassCounter) -> None:
        self._number, self._drafter, self._counter = number, drafter, counter

    def extend(self, requests: Sequence[DraftRequest], should_stop: Callable[[], bool]) -> None:
        """Draft without a break: the noise of draft tokens depends on where they start."""
        requests = [request for request in requests if request.num_missing]
        if not requests:
            return
        steps = [
            request.sequence.draft_step(self._number, request.num_missing) for request in requests
        ]
        proposals = self._drafter.draft(steps, never)
        for request, proposal in zip(requests, proposals, strict=True):
            sequence = request.sequence
            sequence.append(proposal.tokens, split_probs(proposal))
            sequence.num_cached[self._number] = min(proposal.num_cached, len(sequence))
        self._counter.passes[self._number] += max(len(proposal.tokens) for proposal in proposals)


class ReviewStage:
    """A stage that reviews the draft tokens of smaller stages, all sequences in one pass.

    The tokens that it proposes are drawn from its own distribution.
    """

    def __init__(
        self,
        number: int,
        drafter: NeuralDrafter,
        below: StageNode,
        counter: PassCounter,
        *,
        lenience: float,
    ) -> None:
        self._number, self._drafter, self._below = number, drafter, below
        self._counter, self._lenience = counter, lenience

    def extend(self, requests: Sequence[DraftRequest], should_stop: Callable[[], bool]) -> None:
        """Let the smaller stages draft, and review; repeat until all sequences are long enough.

        A review adds a token to the accepted ones, so the smaller stages get one token less to do.
        """
        while requests := [request for request in requests if request.num_missing]:
            bases = [len(request.sequence) for request in requests]
            self._below.extend(
                [
                    DraftRequest(request.sequence, base, request.stop - 1)
                    for request, base in zip(requests, bases, strict=True)
                ],
                never,
            )
            requests = self._review(requests, bases)
            if should_stop():
                return

    def _review(self, requests: Sequence[DraftRequest], bases: Sequence[int]) -> list[DraftRequest]:
        """Review the tokens past each base, and return the requests for which there was room.

        The other sequences are truncated to their bases.
        """
        steps = [
            request.sequence.missing_step(self._number, before=base)
            for request, base in zip(requests, bases, strict=True)
        ]
        fit = self._drafter.which_fit(steps)
        for request, base, fits in zip(requests, bases, fit, strict=True):
            if not fits:
                request.sequence.truncate(base)
        reviewed = list(compress(zip(requests, bases, steps, strict=True), fit))
        if reviewed:
            logits = self._drafter.compute_logits(
                [step for *_, step in reviewed],
                [len(request.sequence) - base + 1 for request, base, _ in reviewed],
            )
            logits = self._drafter.grammar_states.mask_for(
                [request.sequence.drafted_sequence(base) for request, base, _ in reviewed]
            ).apply(logits)
            results = review(
                logits,
                [self._review_request(request.sequence, base) for request, base, _ in reviewed],
                support=self._drafter.support,
                lenience=self._lenience,
            )
            for (request, base, _), result in zip(reviewed, results, strict=True):
                self._apply(request.sequence, base, result)
            self._counter.passes[self._number] += 1
        return [request for request, *_ in reviewed]

    def _review_request(self, sequence: CascadeSequence, base: int) -> ReviewRequest:
        return ReviewRequest(
            base,
            tuple(sequence.tokens[base:]),
            sequence.draft_probs[base - sequence.start :],
            sequence.stage_policy(self._number),
            self._drafter.history(sequence.seq_id, base, sequence.policy),
        )

    def _apply(self, sequence: CascadeSequence, base: int, result: ReviewResult) -> None:
        sequence.num_cached[self._number] = len(sequence)
        sequence.truncate(base + result.accepted)
        sequence.draft_probs[base - sequence.start :] = result.draft_probs[:-1]
        sequence.append([result.next_token], result.draft_probs[-1:])


@dataclass(frozen=True, slots=True)
class StageQuota:
    """A node, and how many tokens it and those before it may write; None: as many as wanted."""

    node: StageNode
    max_tokens: int | None

    def limit(self, request: DraftRequest) -> DraftRequest:
        """Return the request with its stop lowered to the quota."""
        if self.max_tokens is None:
            return request
        return replace(request, stop=min(request.stop, request.base + self.max_tokens))


class HorizontalStages:
    """Nodes in turn: the larger write first, smaller ones the later positions.

    Where a node knows no token, the next one takes over.
    """

    def __init__(self, quotas: Sequence[StageQuota]) -> None:
        self._quotas = quotas

    def extend(self, requests: Sequence[DraftRequest], should_stop: Callable[[], bool]) -> None:
        for quota in self._quotas:
            limited = [quota.limit(request) for request in requests]
            if any(request.num_missing for request in limited):
                quota.node.extend(limited, should_stop)
                if should_stop():
                    return
