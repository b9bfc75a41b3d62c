"""Draft in the target's worker after each of its passes, before the next round asks for it.

The worker knows the texts from the target's cache, so no request is needed: a step says how many
draft tokens are wanted after its verdict.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from specserve.config.sections import MAX_CATCH_UP
from specserve.models.cache import PagedCache
from specserve.types import (
    DraftStep,
    Grammar,
    PreparedProposal,
    Proposal,
    Verdict,
    VerifyStep,
)

log = logging.getLogger(__name__)

MAX_BACKOFF_PASSES = 256
"""Longest pause of a drafter that fails."""


class AfterVerify(Protocol):
    """A drafter in the target's process."""

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]: ...
    def release(self, seq_ids: Sequence[int]) -> None: ...


class DraftAfterVerify:
    """The proposals after the verdicts of each pass.

    A drafter that fails gives no draft tokens, and the target goes on without it.
    """

    def __init__(self, drafter: AfterVerify, cache: PagedCache) -> None:
        self._drafter, self._cache = drafter, cache
        self._proposals: dict[int, Proposal] = {}  # the latest, by sequence
        self._cached: dict[int, int] = {}  # valid positions in the drafter's cache, by sequence
        # What the first step of a sequence brings, until the drafter has it.
        self._sources: dict[int, tuple[tuple[int, ...], Grammar | None]] = {}
        self._failures = self._backoff = 0

    def draft_after(
        self, steps: Sequence[VerifyStep], verdicts: Sequence[Verdict]
    ) -> tuple[PreparedProposal, ...]:
        """Return proposals after the verdicts of a pass, for the steps that want draft tokens."""
        draft_steps = list(self._draft_steps(steps, verdicts))
        if self._backoff:
            self._backoff -= 1
            return ()
        try:
            proposals = self._drafter.propose(draft_steps, math.inf) if draft_steps else ()
        except Exception:
            self._drop_all([step.seq_id for step in steps])
            self._backoff = min(2**self._failures - 1, MAX_BACKOFF_PASSES)
            self._failures += 1
            log.exception("the drafter failed; %d passes go on without it", self._backoff)
            return ()
        self._failures = 0
        for step, proposal in zip(draft_steps, proposals, strict=True):
            self._cached[step.seq_id] = min(proposal.num_cached, step.stop)
            if proposal.num_cached:
                self._sources.pop(step.seq_id, None)
        self._proposals.update({proposal.seq_id: proposal for proposal in proposals})
        return tuple(
            PreparedProposal(step.tokens[-1], proposal)
            for step, proposal in zip(draft_steps, proposals, strict=True)
            if proposal.tokens
        )

    def release(self, seq_ids: Sequence[int]) -> None:
        """Release sequences, those that were never drafted for included."""
        self._drafter.release(seq_ids)
        for seq_id in seq_ids:
            self._drop(seq_id)

    def _draft_steps(
        self, steps: Sequence[VerifyStep], verdicts: Sequence[Verdict]
    ) -> Iterator[DraftStep]:
        """Yield a step for each sequence that is drafted for, or prefilled for that."""
        decided = {verdict.seq_id: verdict for verdict in verdicts if verdict.is_decision}
        for step in steps:
            verdict = decided.get(step.seq_id)
            if not step.start:  # a new sequence, or one whose caches are not to be relied on
                self._drop(step.seq_id)
                self._sources[step.seq_id] = step.encoder_input, step.grammar
            stop = step.stop + (0 if verdict is None else verdict.accepted)
            self._keep_accepted(step, stop)
            if step.gamma and (verdict is None or verdict.error is None):
                yield self._draft_step(step, stop, verdict)

    def _keep_accepted(self, step: VerifyStep, stop: int) -> None:
        """Count the draft tokens that the drafter has cached, as far as they were accepted."""
        proposal = self._proposals.pop(step.seq_id, None)
        if proposal is not None and proposal.start == step.stop and step.drafts:
            self._cached[step.seq_id] = min(proposal.num_cached, stop)

    def _draft_step(self, step: VerifyStep, stop: int, verdict: Verdict | None) -> DraftStep:
        """Return the step that fills the drafter's cache and drafts after the verdict.

        A drafter that lacks too much catches up over several passes, and drafts again then.
        """
        start = self._cached.get(step.seq_id, 0)
        text = tuple(self._cache.tokens(step.seq_id, start, stop).tolist())
        if verdict is not None:
            text += (verdict.next_token,)
        whole = verdict is not None and len(text) <= MAX_CATCH_UP
        encoder_input, grammar = self._sources.get(step.seq_id, ((), None))
        return DraftStep(
            step.seq_id,
            start,
            text if whole else text[:MAX_CATCH_UP],
            step.gamma if whole else 0,
            step.policy,
            encoder_input,
            grammar,
        )

    def _drop_all(self, seq_ids: Sequence[int]) -> None:
        """Start these sequences, and all that were drafted for, from nothing."""
        known = [*{*seq_ids, *self._cached}]
        self._cached.clear()
        self._proposals.clear()
        try:
            self._drafter.release(known)
        except Exception:
            log.exception("the drafter did not release %d sequences", len(known))

    def _drop(self, seq_id: int) -> None:
        self._cached.pop(seq_id, None)
        self._proposals.pop(seq_id, None)
        self._sources.pop(seq_id, None)
