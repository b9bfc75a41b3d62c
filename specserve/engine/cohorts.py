"""Two cohorts: one half of the sequences is drafted for while the other half is verified.

Each token then waits for two verifications, so one cohort is the rule: the pacer asks for two where
drafting takes a large share of a round and a pass for half of the sequences costs clearly less.
Knows no pages, limits or workers.
"""

from __future__ import annotations

import asyncio
from collections import abc
from dataclasses import dataclass, replace
from typing import Any

from specserve.engine.batch import Batch
from specserve.engine.sequence import Sequence
from specserve.types import VerifyStep


@dataclass(frozen=True, slots=True)
class DraftedBatch:
    """A batch that has its proposals and can be verified."""

    batch: Batch
    steps: abc.Sequence[VerifyStep]
    started_at: float
    drafted_at: float
    draft_seconds: float


Propose = abc.Callable[[Batch], abc.Coroutine[Any, Any, DraftedBatch]]


class Cohorts:
    """The cohort that waits for its verification, and the one that is being drafted for.

    While there is only one cohort, neither exists and `next_to_verify` just proposes.
    """

    def __init__(self, clock: abc.Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: DraftedBatch | None = None
        self._drafting: asyncio.Future[DraftedBatch] | None = None
        self._split = False  # True if this round begins to take turns

    @property
    def waiting(self) -> Batch | None:
        """The drafted batch that waits for its verification."""
        return None if self._waiting is None else self._waiting.batch

    def select(
        self, running: abc.Sequence[Sequence], *, isolated: Sequence | None, two: bool
    ) -> abc.Sequence[Sequence]:
        """Return the running sequences that are drafted for in this round.

        These are all that are not waiting for their verification, every other one when two cohorts
        begin to take turns, or one that must run alone.
        """
        self._drop_ended(running)
        members = running
        if self._waiting is not None:
            waiting = {entry.sequence.seq_id for entry in self._waiting.batch.entries}
            members = [sequence for sequence in running if sequence.seq_id not in waiting]
        self._split = two and isolated is None and self._waiting is None
        if isolated is not None:
            return [sequence for sequence in members if sequence is isolated]
        return members[::2] if self._split else members

    async def next_to_verify(self, batch: Batch, propose: Propose) -> DraftedBatch | None:
        """Propose for the batch and return the one to verify now.

        With one cohort that is the batch itself. With two it is the half that waited, while
        proposals for the batch are under way; None in the first of their rounds.
        """
        if self._waiting is None:
            drafted = await propose(batch)
            if not self._split:
                return drafted
            self._waiting = drafted
            return None
        waiting, self._waiting = self._waiting, None
        if batch.entries:
            self._drafting = asyncio.ensure_future(propose(batch))
        await asyncio.sleep(0)  # so that the drafter has its message before the target
        return replace(waiting, started_at=self._clock(), drafted_at=self._clock())

    async def end_turn(self, *, verified: bool) -> None:
        """Wait for the half that is being drafted for; it is verified in the next round.

        A target that failed has lost what those steps build on.
        """
        if self._drafting is not None:
            drafted = await self._drafting
            self._drafting = None
            self._waiting = drafted if verified else None

    async def drop(self) -> None:
        """Drop both cohorts, once the drafter has answered: it takes one call at a time."""
        drafting, self._drafting, self._waiting = self._drafting, None, None
        if drafting is not None:
            await asyncio.wait([drafting])

    def _drop_ended(self, running: abc.Sequence[Sequence]) -> None:
        """Drop waiting sequences that have ended or were preempted since they were drafted for."""
        if self._waiting is None:
            return
        batch, alive = self._waiting.batch, set(map(id, running))
        kept = [entry for entry in batch.entries if id(entry.sequence) in alive]
        if len(kept) < len(batch.entries):
            ids = {entry.sequence.seq_id for entry in kept}
            batch.entries = kept
            steps = [step for step in self._waiting.steps if step.seq_id in ids]
            self._waiting = replace(self._waiting, steps=steps)
        if not kept:
            self._waiting = None


def expected_speedup(
    num_sequences: int,
    gamma: int,
    *,
    accepted: float,  # expected draft tokens accepted a round
    half_verify_seconds: float,
    plain_seconds: float,
    draft_pass_seconds: float,
) -> float:
    """Return the tokens a second of two cohorts, over those of plain decoding.

    Both devices work twice a turn, so it pays where passes for half of the sequences cost less.
    """
    if num_sequences < 2 or not gamma:
        return 1.0
    drafting = gamma * draft_pass_seconds
    turn = max(2 * half_verify_seconds, 2 * drafting, half_verify_seconds + drafting)
    return num_sequences * (1 + accepted) / turn / (num_sequences / plain_seconds)
