"""The two workers as a round calls them: answers are checked, a failing drafter is skipped.

Knows no scheduling.
"""

from __future__ import annotations

import logging
import math
from collections import abc

from specserve.errors import BadAnswer
from specserve.types import Drafter, DraftStep, Proposal, Target, Verdict, VerifyStep

log = logging.getLogger(__name__)

MAX_BACKOFF_ROUNDS = 256


class WorkerPair:
    """A target, and perhaps a drafter. Only the target's failures reach the caller."""

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target, self.drafter = target, drafter
        self._failures = 0  # of the drafter, in a row
        self._backoff_rounds = 0  # rounds until the drafter is called again

    async def propose(
        self, steps: abc.Sequence[DraftStep], deadline: float
    ) -> abc.Sequence[Proposal] | None:
        """Return the drafter's proposals, or None if it failed.

        After a failure nothing is known of its cache, and a growing number of rounds goes on
        without it.
        """
        if self.drafter is None or not steps:
            return ()
        if self._backoff_rounds:
            self._backoff_rounds -= 1
            return ()
        try:
            proposals = await self.drafter.propose(steps, deadline)
            _check_proposals(steps, proposals)
        except Exception:
            # The first few failures may be accidents: the drafter is called again at once.
            backoff = min(max(1, 2**self._failures // 8), MAX_BACKOFF_ROUNDS)
            self._backoff_rounds = backoff - 1
            self._failures += 1
            log.exception(
                "the drafter failed; %d more rounds go on without it", self._backoff_rounds
            )
            return None
        self._failures = 0
        return proposals

    def verify(self, steps: abc.Sequence[VerifyStep]) -> abc.Awaitable[abc.Sequence[Verdict]]:
        """Send the steps to the target and return its verdicts, to be awaited.

        A remote target is busy once this returns. Whatever the target fails with, and whenever,
        is raised by the awaitable.
        """
        try:
            return _checked(steps, self.target.verify(steps))
        except Exception as error:
            return _failed(error)

    async def release(self, seq_ids: abc.Sequence[int]) -> None:
        """Let the workers free the pages of these sequences."""
        for worker in (self.target, self.drafter):
            if worker is not None:
                await ignore_failure(
                    f"{type(worker).__name__} to release {len(seq_ids)} sequences",
                    worker.release(seq_ids),
                )

    async def flush_releases(self) -> None:
        """Send both workers an empty step list.

        Remote workers receive releases with their next steps; without running sequences there
        would be none.
        """
        if self.drafter is not None:
            await ignore_failure(
                "the drafter to flush releases", self.drafter.propose((), math.inf)
            )
        await ignore_failure("the target to flush releases", self.target.verify(()))


async def _checked(
    steps: abc.Sequence[VerifyStep], call: abc.Awaitable[abc.Sequence[Verdict]]
) -> abc.Sequence[Verdict]:
    verdicts = await call
    _check_verdicts(steps, verdicts)
    return verdicts


async def _failed(error: Exception) -> abc.Sequence[Verdict]:
    raise error


async def ignore_failure(what: str, call: abc.Awaitable[object]) -> None:
    """Await a call whose failure does not matter here.

    The worker's next step fails, too, and is handled there.
    """
    try:
        await call
    except Exception:
        log.exception("asked %s in vain", what)


def _check_proposals(steps: abc.Sequence[DraftStep], proposals: abc.Sequence[Proposal]) -> None:
    if [step.seq_id for step in steps] != [proposal.seq_id for proposal in proposals]:
        raise BadAnswer("the drafter answered other sequences than were asked for")
    for step, proposal in zip(steps, proposals, strict=True):
        if proposal.tokens and (proposal.start != step.stop or len(proposal.tokens) > step.gamma):
            raise BadAnswer(
                f"the drafter's proposal for sequence {step.seq_id} does not fit its step"
            )


def _check_verdicts(steps: abc.Sequence[VerifyStep], verdicts: abc.Sequence[Verdict]) -> None:
    steps = [step for step in steps if step.is_answered]
    if [step.seq_id for step in steps] != [verdict.seq_id for verdict in verdicts]:
        raise BadAnswer("the target verified other sequences than were asked for")
    for step, verdict in zip(steps, verdicts, strict=True):
        fits = 0 <= verdict.accepted <= len(step.drafts)
        # A verdict may leave open what a grammar that is not compiled yet will allow.
        may_be = (True, False) if step.policy.constrained else (True,)
        if not fits or verdict.is_decision not in (may_be if step.needs_verdict else (False,)):
            raise BadAnswer(f"the target's verdict on sequence {step.seq_id} does not fit its step")
        scores = verdict.prompt_logprobs
        if (scores is not None) != (step.scoring is not None) or (
            scores is not None
            and (scores.start, len(scores)) != (step.start + 1, len(step.scored_tokens))
        ):
            raise BadAnswer(f"the logprobs of sequence {step.seq_id} are not of its step's tokens")
