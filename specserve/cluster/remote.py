"""Target and drafter as the coordinator knows them, at the other end of links. One message each way per worker and round."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from specserve.cluster.link import Client
from specserve.errors import WorkerLost
from specserve.types import DraftStep, Proposal, Verdict, VerifyStep
from specserve.wire import Proposals, Propose, Verdicts, Verify


class RemoteTarget:
    """All ranks get the same message; rank 0 has the verdicts, the others say that they have kept up."""

    def __init__(self, ranks: Sequence[Client], *, deadline_s: float) -> None:
        self._ranks, self._deadline_s = tuple(ranks), deadline_s
        self._number = 0
        self._released: list[int] = []
        self.lost: str | None = None  # which rank did not answer in time, or died
        self.busy_seconds = 0.0  # of rank 0
        self.pages_used = self.prefix_queries = self.prefix_hits = 0

    async def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        self._number += 1
        message = Verify(self._number, tuple(steps), tuple(self._released))
        self._released.clear()
        try:
            first, *_ = await asyncio.gather(*(rank.call(message, self._deadline_s) for rank in self._ranks))
        except WorkerLost as error:
            self.lost = str(error)
            raise
        if not isinstance(first, Verdicts):
            raise WorkerLost(f"the target answered a round with {type(first).__name__}")
        self.busy_seconds += first.seconds
        self.pages_used, self.prefix_queries, self.prefix_hits = first.pages_used, first.prefix_queries, first.prefix_hits
        return first.verdicts

    async def release(self, seq_ids: Sequence[int]) -> None:
        """They go with the next round's message."""
        self._released += seq_ids


class RemoteDrafter:
    """What drafts, elsewhere."""

    def __init__(self, worker: Client, *, deadline_s: float) -> None:
        self._worker, self._deadline_s = worker, deadline_s
        self._number = 0
        self._released: list[int] = []
        self.busy_seconds = 0.0
        self.pages_used = 0

    async def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        self._number += 1
        message = Propose(self._number, deadline, tuple(steps), tuple(self._released))
        self._released.clear()
        try:
            answer = await self._worker.call(message, self._deadline_s)
        except WorkerLost as error:
            self._worker.fail(error)  # one that hangs is waited for once, not every round
            raise
        if not isinstance(answer, Proposals):
            raise WorkerLost(f"the drafter answered a round with {type(answer).__name__}")
        self.busy_seconds += answer.seconds
        self.pages_used = answer.pages_used
        return answer.proposals

    async def release(self, seq_ids: Sequence[int]) -> None:
        """They go with the next round's message."""
        self._released += seq_ids
