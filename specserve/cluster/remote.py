"""Target and drafter as the coordinator knows them, at the other end of links. One message each way per worker and round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from specserve.cluster.clocks import Alignment
from specserve.cluster.link import Client
from specserve.engine.journal import Exchange
from specserve.errors import WorkerLost
from specserve.types import DraftStep, Proposal, Span, Verdict, VerifyStep
from specserve.wire import Message, Proposals, Propose, Verdicts, Verify

Report = Callable[[Exchange], None]


class RemoteTarget:
    """All ranks get the same message; rank 0 has the verdicts, the others say that they have kept up."""

    def __init__(self, ranks: Sequence[Client], *, deadline_s: float, report: Report | None = None) -> None:
        self._ranks, self._deadline_s = tuple(ranks), deadline_s
        self._clocks, self._report = Alignment(), report
        self._number = 0
        self._released: list[int] = []
        self.lost: str | None = None  # which rank did not answer in time, or died
        self.busy_seconds = 0.0  # of rank 0
        self.pages_used = self.prefix_queries = self.prefix_hits = 0

    def verify(self, steps: Sequence[VerifyStep]) -> Awaitable[Sequence[Verdict]]:
        """The ranks are at work once this returns."""
        self._number += 1
        message = Verify(self._number, tuple(steps), tuple(self._released))
        self._released.clear()
        sent = time.perf_counter()
        return self._verdicts([rank.call(message, self._deadline_s) for rank in self._ranks], sent)

    async def release(self, seq_ids: Sequence[int]) -> None:
        """They go with the next round's message."""
        self._released += seq_ids

    async def _verdicts(self, calls: Sequence[Awaitable[Message]], sent: float) -> Sequence[Verdict]:
        try:
            first = await calls[0] if len(calls) == 1 else (await asyncio.gather(*calls))[0]
        except WorkerLost as error:
            self.lost = str(error)
            raise
        if not isinstance(first, Verdicts):
            raise WorkerLost(f"the target answered a round with {type(first).__name__}")
        self.pages_used, self.prefix_queries, self.prefix_hits = first.pages_used, first.prefix_queries, first.prefix_hits
        self.busy_seconds += first.seconds
        if self._report is not None:
            answered = time.perf_counter()
            self._report(Exchange("target", sent, answered, self._clocks.aligned(first.spans, sent=sent, answered=answered)))
        return first.verdicts


class RemoteDrafter:
    """What drafts, elsewhere."""

    def __init__(self, worker: Client, *, deadline_s: float, report: Report | None = None) -> None:
        self._worker, self._deadline_s = worker, deadline_s
        self._clocks, self._report = Alignment(), report
        self._number = 0
        self._released: list[int] = []
        self.busy_seconds = 0.0
        self.pages_used = 0

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Awaitable[Sequence[Proposal]]:
        """The worker is at it once this returns."""
        self._number += 1
        message = Propose(self._number, deadline, tuple(steps), tuple(self._released))
        self._released.clear()
        sent = time.perf_counter()
        return self._proposals(self._worker.call(message, self._deadline_s), sent)

    async def release(self, seq_ids: Sequence[int]) -> None:
        """They go with the next round's message."""
        self._released += seq_ids

    async def _proposals(self, call: Awaitable[Message], sent: float) -> Sequence[Proposal]:
        try:
            answer = await call
        except WorkerLost as error:
            self._worker.fail(error)  # one that hangs is waited for once, not every round
            raise
        if not isinstance(answer, Proposals):
            raise WorkerLost(f"the drafter answered a round with {type(answer).__name__}")
        self.pages_used = answer.pages_used
        self.busy_seconds += _worked(answer.spans) or answer.seconds
        if self._report is not None:
            answered = time.perf_counter()
            self._report(Exchange("draft", sent, answered, self._clocks.aligned(answer.spans, sent=sent, answered=answered)))
        return answer.proposals


def _worked(spans: Sequence[Span]) -> float:
    """What was prepared unasked counts too."""
    return sum(span.ended - span.begun for span in spans)
