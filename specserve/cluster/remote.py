"""Target and drafter as the coordinator knows them, at the other end of links. One message each way per worker and round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from specserve.cluster.clocks import Alignment
from specserve.cluster.link import Client
from specserve.engine.journal import Exchange
from specserve.errors import WorkerLost
from specserve.types import DraftStep, Foreseen, Proposal, Span, SparseRows, Verdict, VerifyStep
from specserve.wire import Message, Prepared, Proposals, Propose, Verdicts, Verify

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
    """What drafts, elsewhere. What it has foreseen is here already, so a round whose proposals all are does not wait for its answer."""

    def __init__(self, worker: Client, *, deadline_s: float, report: Report | None = None) -> None:
        self._worker, self._deadline_s = worker, deadline_s
        self._clocks, self._report = Alignment(), report
        self._number = 0
        self._released: list[int] = []
        self._foreseen: dict[tuple[int, int, int], Proposal] = {}  # by sequence, where it begins, and the token before that
        self._unheard: asyncio.Future[Sequence[Proposal]] | None = None  # an answer that nobody waited for
        self.busy_seconds = 0.0
        self.pages_used = 0
        worker.unasked = self._foresee

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Awaitable[Sequence[Proposal]]:
        """The worker is at it once this returns, or as soon as it has given the answer that nobody waited for."""
        self._number += 1
        message = Propose(self._number, deadline, tuple(steps), tuple(self._released))
        self._released.clear()
        known = self._look_up(steps)
        self._foreseen.clear()
        unheard, self._unheard = self._unheard, None
        if unheard is not None and not unheard.done():
            return self._once_heard(unheard, message)
        if unheard is not None:
            unheard.result()  # a failure that it brought is this round's
        answer = self._ask(message)
        if known is None:
            return answer
        self._unheard = asyncio.ensure_future(answer)
        self._unheard.add_done_callback(_noticed)
        return _at_once(known)

    async def release(self, seq_ids: Sequence[int]) -> None:
        """They go with the next round's message."""
        self._released += seq_ids

    def _foresee(self, message: Prepared) -> None:
        if message.number == self._number:
            self._foreseen = {(one.proposal.seq_id, one.proposal.start, one.token): one.proposal for one in message.foreseen}

    def _look_up(self, steps: Sequence[DraftStep]) -> list[Proposal] | None:
        """The proposals for all steps, or None where one of them must be waited for."""
        if not self._foreseen:
            return None
        found = [self._known(step) for step in steps]
        known = [proposal for proposal in found if proposal is not None]
        return known if known and len(known) == len(steps) else None

    def _known(self, step: DraftStep) -> Proposal | None:
        """One that was prepared for a smaller gamma is better asked for. A step that wants no drafts is read whenever there is time."""
        stop = step.start + len(step.tokens)
        if not step.gamma:
            return Proposal(step.seq_id, stop, (), None, stop)
        proposal = self._foreseen.get((step.seq_id, stop, step.tokens[-1]))
        return None if proposal is None or len(proposal.tokens) < step.gamma else _shortened(proposal, step.gamma)

    async def _once_heard(self, unheard: asyncio.Future[Sequence[Proposal]], message: Propose) -> Sequence[Proposal]:
        """One call at a time: the last one's answer first."""
        await unheard
        return await self._ask(message)

    def _ask(self, message: Propose) -> Awaitable[Sequence[Proposal]]:
        sent = time.perf_counter()
        return self._proposals(self._worker.call(message, self._deadline_s), sent)

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


class SentAhead:
    """What drafts on rank 0 of the target. Its proposals come unasked, ahead of the verdicts that they continue; nobody is ever waited for."""

    def __init__(self, rank: Client) -> None:
        self._foreseen: dict[int, Foreseen] = {}  # by sequence, the latest
        rank.unasked = self._foresee

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Awaitable[Sequence[Proposal]]:
        """Empty where none has come."""
        return _at_once([self._known(step) for step in steps])

    async def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._foreseen.pop(seq_id, None)

    def _foresee(self, message: Prepared) -> None:
        self._foreseen.update({one.proposal.seq_id: one for one in message.foreseen})

    def _known(self, step: DraftStep) -> Proposal:
        stop, one = step.start + len(step.tokens), self._foreseen.get(step.seq_id)
        if not step.gamma or one is None or (one.proposal.start, one.token) != (stop, step.tokens[-1]):
            return Proposal(step.seq_id, stop, (), None, stop)
        return replace(_shortened(one.proposal, step.gamma), held=stop + step.gamma)


def _noticed(answer: asyncio.Future[Sequence[Proposal]]) -> None:
    """So that a failure that comes after the last round is no unheard one."""
    if not answer.cancelled():
        answer.exception()


async def _at_once(proposals: Sequence[Proposal]) -> Sequence[Proposal]:
    return proposals


def _shortened(proposal: Proposal, gamma: int) -> Proposal:
    if len(proposal.tokens) <= gamma:
        return proposal
    q = None if proposal.q is None else SparseRows(proposal.q.ids[:gamma], proposal.q.probs[:gamma])
    return replace(proposal, tokens=proposal.tokens[:gamma], q=q, held=min(proposal.held, proposal.start + max(0, gamma - 1)))


def _worked(spans: Sequence[Span]) -> float:
    """What was prepared unasked counts too."""
    return sum(span.ended - span.begun for span in spans)
