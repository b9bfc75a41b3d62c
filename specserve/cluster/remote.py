"""Target and drafter as the coordinator knows them, at the other end of links. One message each way per worker and round.

The workers may be lost and come back as others. Meanwhile a round waits for its target, and goes on without its drafter.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from specserve.cluster.clocks import Alignment
from specserve.cluster.transport.link import Client
from specserve.engine.trace import Exchange
from specserve.errors import Displaced, WorkerLost
from specserve.types import DraftStep, Foreseen, Proposal, Span, SparseRows, Verdict, VerifyStep
from specserve.wire.messages import Message, Prepared, Proposals, Propose, Verdicts, Verify

log = logging.getLogger(__name__)

Report = Callable[[Exchange], None]
Lose = Callable[[str], None]

PATIENCE_S = 0.1  # that a round waits for a drafter at least, before it goes on without
PATIENCE = 4.0  # times what its answers usually take
FIRST_S, BLEND = 0.1, 0.1  # what they are thought to take at first, and how fast that is learnt


class RemoteTarget:
    """All ranks get the same message; rank 0 has the verdicts, the others say that they have kept up."""

    def __init__(self, *, deadline_s: float, report: Report | None = None) -> None:
        self._deadline_s, self._report = deadline_s, report
        self._ranks: tuple[Client, ...] = ()
        self._here = (
            asyncio.Event()
        )  # set while there are ranks, or it is known that there will be none
        self._gone: Displaced | None = None
        self._clocks = Alignment()
        self._number = 0
        self._released: list[int] = []
        self.lose: Lose = log.error  # is told why the ranks cannot be relied on any more
        self.unasked: Callable[[Prepared], None] | None = (
            None  # takes what rank 0 sends ahead, if it drafts
        )
        self.has_answered = False  # since they are here
        self.busy_seconds = 0.0  # of rank 0
        self.pages_used = self.prefix_queries = self.prefix_hits = 0
        self._prefix_before = (0, 0)  # what ranks that are gone had counted

    def attach(self, ranks: Sequence[Client]) -> None:
        """Work for these from now on. They hold nothing."""
        self._ranks, self._clocks, self.has_answered = tuple(ranks), Alignment(), False
        self._ranks[0].unasked = self.unasked
        self._prefix_before = (self.prefix_queries, self.prefix_hits)
        self._released.clear()
        self._here.set()

    def detach(self) -> None:
        """Rounds wait from now on."""
        self._ranks, self.pages_used = (), 0
        self._here.clear()

    def give_up(self, error: Displaced) -> None:
        """There will be no others: every round fails with this."""
        self._gone = error
        self._here.set()

    def verify(self, steps: Sequence[VerifyStep]) -> Awaitable[Sequence[Verdict]]:
        """The ranks are at work once this returns, unless they have yet to come back."""
        if not self._ranks:
            return self._once_here(steps)
        self._number += 1
        message = Verify(self._number, tuple(steps), tuple(self._released))
        self._released.clear()
        sent = time.perf_counter()
        return self._verdicts([rank.call(message, self._deadline_s) for rank in self._ranks], sent)

    async def release(self, seq_ids: Sequence[int]) -> None:
        """They go with the next round's message."""
        self._released += seq_ids

    async def _once_here(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        """What is read anew would not fit the steps: they build on what the lost ranks held. So this round is lost, too."""
        await self._here.wait()
        if self._gone is not None:
            raise self._gone
        if all(step.start == 0 for step in steps):
            return await self.verify(steps)
        raise WorkerLost("the target was lost between two rounds")

    async def _verdicts(
        self, calls: Sequence[Awaitable[Message]], sent: float
    ) -> Sequence[Verdict]:
        try:
            first = await calls[0] if len(calls) == 1 else (await asyncio.gather(*calls))[0]
        except WorkerLost as error:
            self.lose(str(error))
            raise
        if not isinstance(first, Verdicts):
            raise WorkerLost(f"the target answered a round with {type(first).__name__}")
        queries, hits = self._prefix_before
        self.pages_used, self.prefix_queries, self.prefix_hits = (
            first.pages_used,
            queries + first.prefix_queries,
            hits + first.prefix_hits,
        )
        self.has_answered = True
        self.busy_seconds += first.seconds
        if self._report is not None:
            answered = time.perf_counter()
            self._report(
                Exchange(
                    "target",
                    sent,
                    answered,
                    self._clocks.aligned(first.spans, sent=sent, answered=answered),
                )
            )
        return first.verdicts


class RemoteDrafter:
    """What drafts, elsewhere. What it has foreseen is here already, so a round whose proposals all are does not wait for its answer.

    One that is away, or takes unusually long, has no proposals: no round waits for it. It is asked again once it has answered.
    """

    def __init__(self, *, deadline_s: float, report: Report | None = None) -> None:
        self._deadline_s, self._report = deadline_s, report
        self._worker: Client | None = None
        self._clocks = Alignment()
        self._number = 0
        self._released: list[int] = []
        self._foreseen: dict[
            tuple[int, int, int], Proposal
        ] = {}  # by sequence, where it begins, and the token before that
        self._unheard: asyncio.Future[Sequence[Proposal]] | None = (
            None  # an answer that nobody waited for
        )
        self._usual_s = FIRST_S  # that an answer takes; known of its predecessors, too
        self.lose: Lose = log.error  # is told why the worker cannot be relied on any more
        self.has_answered = False
        self.busy_seconds = 0.0
        self.pages_used = 0

    def attach(self, workers: Sequence[Client]) -> None:
        """Ask this one from now on. It holds nothing."""
        (self._worker,) = workers
        self._worker.unasked = self._foresee
        self._clocks, self.has_answered = Alignment(), False
        self._released.clear()

    def detach(self) -> None:
        self._worker, self._unheard, self.pages_used = None, None, 0
        self._foreseen.clear()

    def give_up(self, error: Displaced) -> None:
        """Rounds go on without drafts."""

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Awaitable[Sequence[Proposal]]:
        """The worker is at it once this returns, or as soon as it has given the answer that nobody waited for."""
        worker = self._worker
        if worker is None or worker.is_late:
            return _at_once(_nothing(steps, is_here=worker is not None))
        self._number += 1
        message = Propose(self._number, deadline, tuple(steps), tuple(self._released))
        self._released.clear()
        known = self._look_up(steps)
        self._foreseen.clear()
        unheard, self._unheard = self._unheard, None
        if unheard is not None and not unheard.done():
            return self._once_heard(unheard, worker, message)
        if unheard is not None:
            unheard.result()  # a failure that it brought is this round's
        answer = self._ask(worker, message)
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
            self._foreseen = {
                (one.proposal.seq_id, one.proposal.start, one.token): one.proposal
                for one in message.foreseen
            }

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
        return (
            None
            if proposal is None or len(proposal.tokens) < step.gamma
            else _shortened(proposal, step.gamma)
        )

    async def _once_heard(
        self, unheard: asyncio.Future[Sequence[Proposal]], worker: Client, message: Propose
    ) -> Sequence[Proposal]:
        """One call at a time: the last one's answer first."""
        await unheard
        if worker is not self._worker or worker.is_late:
            return _nothing(message.steps, is_here=worker is self._worker)
        return await self._ask(worker, message)

    def _ask(self, worker: Client, message: Propose) -> Awaitable[Sequence[Proposal]]:
        sent = time.perf_counter()
        patience = min(self._deadline_s, max(PATIENCE_S, PATIENCE * self._usual_s))
        return self._proposals(worker, worker.call(message, patience), message, sent)

    async def _proposals(
        self, worker: Client, call: Awaitable[Message], message: Propose, sent: float
    ) -> Sequence[Proposal]:
        try:
            answer = await call
        except WorkerLost as error:
            return self._without(worker, message, error)
        if not isinstance(answer, Proposals):
            raise WorkerLost(f"the drafter answered a round with {type(answer).__name__}")
        answered = time.perf_counter()
        self.has_answered = True
        self._usual_s += BLEND * (answered - sent - self._usual_s)
        self.pages_used = answer.pages_used
        self.busy_seconds += _worked(answer.spans) or answer.seconds
        if self._report is not None:
            self._report(
                Exchange(
                    "draft",
                    sent,
                    answered,
                    self._clocks.aligned(answer.spans, sent=sent, answered=answered),
                )
            )
        return answer.proposals

    def _without(self, worker: Client, message: Propose, error: WorkerLost) -> Sequence[Proposal]:
        """A drafter that is late may only be slow now: it is waited for longer the next time, and lost if it does not come back."""
        if worker is not self._worker:
            return _nothing(message.steps, is_here=False)
        if not worker.is_late:
            self.lose(str(error))
            return _nothing(message.steps, is_here=False)
        log.warning("a round goes on without its drafts: %s", error)
        self._usual_s *= 1.5
        asyncio.get_running_loop().call_later(
            self._deadline_s, self._lose_if_late, worker, str(error)
        )
        return _nothing(message.steps, is_here=True)

    def _lose_if_late(self, worker: Client, why: str) -> None:
        if worker is self._worker and worker.is_late:
            self.lose(why)


class SentAhead:
    """What drafts on rank 0 of the target. Its proposals come unasked, ahead of the verdicts that they continue; nobody is ever waited for."""

    def __init__(self, target: RemoteTarget) -> None:
        self._foreseen: dict[int, Foreseen] = {}  # by sequence, the latest
        target.unasked = self._foresee

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
        if (
            not step.gamma
            or one is None
            or (one.proposal.start, one.token) != (stop, step.tokens[-1])
        ):
            return Proposal(step.seq_id, stop, (), None, stop)
        return replace(_shortened(one.proposal, step.gamma), held=stop + step.gamma)


def _noticed(answer: asyncio.Future[Sequence[Proposal]]) -> None:
    """So that a failure that comes after the last round is no unheard one."""
    if not answer.cancelled():
        answer.exception()


async def _at_once(proposals: Sequence[Proposal]) -> Sequence[Proposal]:
    return proposals


def _nothing(steps: Sequence[DraftStep], *, is_here: bool) -> list[Proposal]:
    """No drafts. What the steps built on is held still, unless who held it is gone."""
    return [
        Proposal(step.seq_id, step.start + len(step.tokens), (), None, step.start if is_here else 0)
        for step in steps
    ]


def _shortened(proposal: Proposal, gamma: int) -> Proposal:
    if len(proposal.tokens) <= gamma:
        return proposal
    q = None if proposal.q is None else SparseRows(proposal.q.ids[:gamma], proposal.q.probs[:gamma])
    return replace(
        proposal,
        tokens=proposal.tokens[:gamma],
        q=q,
        held=min(proposal.held, proposal.start + max(0, gamma - 1)),
    )


def _worked(spans: Sequence[Span]) -> float:
    """What was prepared unasked counts too."""
    return sum(span.ended - span.begun for span in spans)
