"""The two workers as a round needs them: answers are checked, and a drafter that fails is done without. Knows no scheduling."""

from __future__ import annotations

import logging
import math
from collections import abc

from specserve.errors import WorkerLost
from specserve.types import Drafter, DraftStep, Proposal, Target, Verdict, VerifyStep

log = logging.getLogger(__name__)

LONGEST_REST = 256  # rounds


class Crew:
    """A target, and perhaps a drafter. Only the target's failures are anyone's concern."""

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target, self.drafter = target, drafter
        self._failures = 0  # of the drafter, in a row
        self._rest = 0  # rounds until it is asked again

    async def propose(
        self, steps: abc.Sequence[DraftStep], deadline: float
    ) -> abc.Sequence[Proposal] | None:
        """None when the drafter failed: then nothing is known of what it holds. One that keeps failing is asked ever more seldom."""
        if self.drafter is None or not steps:
            return ()
        if self._rest:
            self._rest -= 1
            return ()
        try:
            proposals = await self.drafter.propose(steps, deadline)
            _check_proposals(steps, proposals)
        except Exception:
            self._rest = (
                min(max(1, 2**self._failures // 8), LONGEST_REST) - 1
            )  # the first few may be a mishap
            self._failures += 1
            log.exception("the drafter failed; %d more rounds go on without it", self._rest)
            return None
        self._failures = 0
        return proposals

    def verify(self, steps: abc.Sequence[VerifyStep]) -> abc.Awaitable[abc.Sequence[Verdict]]:
        """A target elsewhere is at work once this returns. Raises when awaited, whatever the target failed with and whenever."""
        try:
            return _checked(steps, self.target.verify(steps))
        except Exception as error:
            return _failed(error)

    async def release(self, seq_ids: abc.Sequence[int]) -> None:
        """Tells the workers which sequences they may forget."""
        for worker in (self.target, self.drafter):
            if worker is not None:
                await _unless_it_fails(
                    f"{type(worker).__name__} to release {len(seq_ids)} sequences",
                    worker.release(seq_ids),
                )

    async def settle(self) -> None:
        """A round of nothing: workers that hear of releases with their next steps hear of them now, though there are none."""
        if self.drafter is not None:
            await _unless_it_fails("the drafter to settle", self.drafter.propose((), math.inf))
        await _unless_it_fails("the target to settle", self.target.verify(()))


async def _checked(
    steps: abc.Sequence[VerifyStep], call: abc.Awaitable[abc.Sequence[Verdict]]
) -> abc.Sequence[Verdict]:
    verdicts = await call
    _check_verdicts(steps, verdicts)
    return verdicts


async def _failed(error: Exception) -> abc.Sequence[Verdict]:
    raise error


async def _unless_it_fails(what: str, call: abc.Awaitable[object]) -> None:
    """A worker that cannot even forget will fail in its next step, where that is dealt with."""
    try:
        await call
    except Exception:
        log.exception("asked %s in vain", what)


def _check_proposals(steps: abc.Sequence[DraftStep], proposals: abc.Sequence[Proposal]) -> None:
    if [step.seq_id for step in steps] != [proposal.seq_id for proposal in proposals]:
        raise WorkerLost("the drafter answered other sequences than were asked for")
    for step, proposal in zip(steps, proposals, strict=True):
        if proposal.tokens and (
            proposal.start != step.start + len(step.tokens) or len(proposal.tokens) > step.gamma
        ):
            raise WorkerLost(
                f"the drafter's proposal for sequence {step.seq_id} does not fit its step"
            )


def _check_verdicts(steps: abc.Sequence[VerifyStep], verdicts: abc.Sequence[Verdict]) -> None:
    steps = [step for step in steps if step.decide]
    if [step.seq_id for step in steps] != [verdict.seq_id for verdict in verdicts]:
        raise WorkerLost("the target judged other sequences than were asked for")
    for step, verdict in zip(steps, verdicts, strict=True):
        if not 0 <= verdict.accepted <= len(step.drafts):
            raise WorkerLost(
                f"the target's verdict on sequence {step.seq_id} does not fit its step"
            )
