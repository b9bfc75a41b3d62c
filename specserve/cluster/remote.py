"""Implement the coordinator's Target and Drafter over links, with one message each way per round.

Workers may be lost and replaced. Meanwhile a round waits for its target but goes on without its
drafter.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from specserve.cluster.clocks import ClockAlignment
from specserve.cluster.transport.link import Client
from specserve.engine.trace import Exchange
from specserve.errors import Displaced, WorkerLost
from specserve.types import (
    DraftStep,
    PreparedProposal,
    Proposal,
    Span,
    SparseDistribution,
    Verdict,
    VerifyStep,
)
from specserve.wire.messages import Message, PreparedProposals, Proposals, Propose, Verdicts, Verify

log = logging.getLogger(__name__)

ReportExchange = Callable[[Exchange], None]
OnLost = Callable[[str], None]

MIN_WAIT_S = 0.1
"""Shortest time that a round waits for its drafter before it goes on without drafts."""
WAIT_FACTOR = 4.0
"""Multiple of the drafter's mean answer time that a round waits."""
INITIAL_ANSWER_S = 0.1
ANSWER_BLEND = 0.1
"""Weight of the newest answer in the mean answer time."""


class RemoteTarget:
    """Target whose ranks all get the same message. Rank 0 answers with the verdicts.

    The other ranks' answers only confirm that they have run the same pass.
    """

    def __init__(self, *, deadline_s: float, report: ReportExchange | None = None) -> None:
        self._deadline_s, self._report = deadline_s, report
        self._ranks: tuple[Client, ...] = ()
        # Set while there are ranks, and once it is known that there will be none.
        self._attached = asyncio.Event()
        self._final_error: Displaced | None = None
        self._clocks = ClockAlignment()
        self._number = 0
        self._released: list[int] = []
        self.on_lost: OnLost = log.error  # called with the reason when a rank is lost
        # Called with the proposals that rank 0 sends ahead, if it drafts.
        self.on_prepared: Callable[[PreparedProposals], None] | None = None
        self.has_answered = False  # since these ranks were attached
        self.busy_seconds = 0.0  # of rank 0
        self.pages_used = self.prefix_queries = self.prefix_hits = 0
        self._lost_prefix_counts = (0, 0)  # counts of ranks that are gone

    def attach(self, ranks: Sequence[Client]) -> None:
        """Use these ranks from now on. Their KV caches are empty."""
        self._ranks, self._clocks, self.has_answered = tuple(ranks), ClockAlignment(), False
        self._ranks[0].on_prepared = self.on_prepared
        self._lost_prefix_counts = (self.prefix_queries, self.prefix_hits)
        self._released.clear()
        self._attached.set()

    def detach(self) -> None:
        """Drop the ranks; rounds wait until others are attached."""
        self._ranks, self.pages_used = (), 0
        self._attached.clear()

    def give_up(self, error: Displaced) -> None:
        """Make every round raise `error`, since there will be no other ranks."""
        self._final_error = error
        self._attached.set()

    def verify(self, steps: Sequence[VerifyStep]) -> Awaitable[Sequence[Verdict]]:
        """Send the steps to all ranks before returning, or once ranks are attached again."""
        if not self._ranks:
            return self._verify_once_attached(steps)
        self._number += 1
        message = Verify(self._number, tuple(steps), tuple(self._released))
        self._released.clear()
        sent = time.perf_counter()
        return self._verdicts([rank.call(message, self._deadline_s) for rank in self._ranks], sent)

    async def release(self, seq_ids: Sequence[int]) -> None:
        """Release the sequences with the next round's message."""
        self._released += seq_ids

    async def _verify_once_attached(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        """Wait for ranks, then verify steps that start at 0, or else raise WorkerLost.

        Other steps build on a KV cache that was lost with the old ranks.
        """
        await self._attached.wait()
        if self._final_error is not None:
            raise self._final_error
        if all(step.start == 0 for step in steps):
            return await self.verify(steps)
        raise WorkerLost("the target was lost between two rounds")

    async def _verdicts(
        self, calls: Sequence[Awaitable[Message]], sent: float
    ) -> Sequence[Verdict]:
        try:
            first = await calls[0] if len(calls) == 1 else (await asyncio.gather(*calls))[0]
        except WorkerLost as error:
            self.on_lost(str(error))
            raise
        if not isinstance(first, Verdicts):
            raise WorkerLost(f"the target answered a round with {type(first).__name__}")
        queries, hits = self._lost_prefix_counts
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
                    self._clocks.align(first.spans, sent=sent, answered=answered),
                )
            )
        return first.verdicts


class RemoteDrafter:
    """Drafter in another process, which sends likely next proposals in advance.

    A round whose proposals have all been prepared uses them and does not wait for its answer. A
    drafter that is away, or takes unusually long, gives no draft tokens, and no round waits for it.
    It is asked again once it has answered.
    """

    def __init__(self, *, deadline_s: float, report: ReportExchange | None = None) -> None:
        self._deadline_s, self._report = deadline_s, report
        self._worker: Client | None = None
        self._clocks = ClockAlignment()
        self._number = 0
        self._released: list[int] = []
        # By sequence, start of the proposal, and the token before it.
        self._prepared: dict[tuple[int, int, int], Proposal] = {}
        # Answer of a round that used prepared proposals instead of waiting for it.
        self._pending_answer: asyncio.Future[Sequence[Proposal]] | None = None
        self._mean_answer_s = INITIAL_ANSWER_S  # kept when the worker is replaced
        self.on_lost: OnLost = log.error  # called with the reason when the worker is lost
        self.has_answered = False
        self.busy_seconds = 0.0
        self.pages_used = 0

    def attach(self, workers: Sequence[Client]) -> None:
        """Use this worker from now on. Its KV cache is empty."""
        (self._worker,) = workers
        self._worker.on_prepared = self._on_prepared
        self._clocks, self.has_answered = ClockAlignment(), False
        self._released.clear()

    def detach(self) -> None:
        """Drop the worker; rounds go on without draft tokens."""
        self._worker, self._pending_answer, self.pages_used = None, None, 0
        self._prepared.clear()

    def give_up(self, error: Displaced) -> None:
        """Do nothing: rounds go on without draft tokens."""

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Awaitable[Sequence[Proposal]]:
        """Propose draft tokens for the steps: the prepared ones, or else those of the worker.

        Sends the request before returning, unless the previous answer is still outstanding; then it
        is sent when that answer arrives.
        """
        worker = self._worker
        if worker is None or worker.is_late:
            return _completed(_no_drafts(steps, is_attached=worker is not None))
        self._number += 1
        message = Propose(self._number, deadline, tuple(steps), tuple(self._released))
        self._released.clear()
        known = self._find_all(steps)
        self._prepared.clear()
        pending, self._pending_answer = self._pending_answer, None
        if pending is not None and not pending.done():
            return self._ask_after(pending, worker, message)
        if pending is not None:
            pending.result()  # an exception of that answer is raised by this round
        answer = self._ask(worker, message)
        if known is None:
            return answer
        self._pending_answer = asyncio.ensure_future(answer)
        self._pending_answer.add_done_callback(_mark_retrieved)
        return _completed(known)

    async def release(self, seq_ids: Sequence[int]) -> None:
        """Release the sequences with the next round's message."""
        self._released += seq_ids

    def _on_prepared(self, message: PreparedProposals) -> None:
        if message.number == self._number:
            self._prepared = {
                (
                    prepared.proposal.seq_id,
                    prepared.proposal.start,
                    prepared.token,
                ): prepared.proposal
                for prepared in message.prepared_proposals
            }

    def _find_all(self, steps: Sequence[DraftStep]) -> list[Proposal] | None:
        """Return prepared proposals for all steps, or None if one of them is missing."""
        if not self._prepared:
            return None
        found = [self._find(step) for step in steps]
        known = [proposal for proposal in found if proposal is not None]
        return known if known and len(known) == len(steps) else None

    def _find(self, step: DraftStep) -> Proposal | None:
        """Return the prepared proposal for a step, or None.

        A proposal prepared for a smaller gamma is not used: the worker is asked instead. A step
        with gamma 0 needs no answer, since its tokens can be prefilled at any time.
        """
        if not step.gamma:
            return Proposal(step.seq_id, step.stop, (), None, step.stop)
        proposal = self._prepared.get((step.seq_id, step.stop, step.tokens[-1]))
        return (
            None
            if proposal is None or len(proposal.tokens) < step.gamma
            else _truncated(proposal, step.gamma)
        )

    async def _ask_after(
        self, pending: asyncio.Future[Sequence[Proposal]], worker: Client, message: Propose
    ) -> Sequence[Proposal]:
        """Wait for the pending answer, then ask: a link carries one call at a time."""
        await pending
        if worker is not self._worker or worker.is_late:
            return _no_drafts(message.steps, is_attached=worker is self._worker)
        return await self._ask(worker, message)

    def _ask(self, worker: Client, message: Propose) -> Awaitable[Sequence[Proposal]]:
        sent = time.perf_counter()
        timeout_s = min(self._deadline_s, max(MIN_WAIT_S, WAIT_FACTOR * self._mean_answer_s))
        return self._proposals(worker, worker.call(message, timeout_s), message, sent)

    async def _proposals(
        self, worker: Client, call: Awaitable[Message], message: Propose, sent: float
    ) -> Sequence[Proposal]:
        try:
            answer = await call
        except WorkerLost as error:
            return self._handle_loss(worker, message, error)
        if not isinstance(answer, Proposals):
            raise WorkerLost(f"the drafter answered a round with {type(answer).__name__}")
        answered = time.perf_counter()
        self.has_answered = True
        self._mean_answer_s += ANSWER_BLEND * (answered - sent - self._mean_answer_s)
        self.pages_used = answer.pages_used
        self.busy_seconds += _total_seconds(answer.spans) or answer.seconds
        if self._report is not None:
            self._report(
                Exchange(
                    "draft",
                    sent,
                    answered,
                    self._clocks.align(answer.spans, sent=sent, answered=answered),
                )
            )
        return answer.proposals

    def _handle_loss(
        self, worker: Client, message: Propose, error: WorkerLost
    ) -> Sequence[Proposal]:
        """Return empty proposals after a call failed, and report the worker if it is lost.

        A worker that is late may only be slow: the next round waits longer, and the worker counts
        as lost if it has still not answered after the deadline.
        """
        if worker is not self._worker:
            return _no_drafts(message.steps, is_attached=False)
        if not worker.is_late:
            self.on_lost(str(error))
            return _no_drafts(message.steps, is_attached=False)
        log.warning("a round goes on without its drafts: %s", error)
        self._mean_answer_s *= 1.5
        asyncio.get_running_loop().call_later(
            self._deadline_s, self._report_if_late, worker, str(error)
        )
        return _no_drafts(message.steps, is_attached=True)

    def _report_if_late(self, worker: Client, why: str) -> None:
        if worker is self._worker and worker.is_late:
            self.on_lost(why)


class PushedProposals:
    """Drafter that runs on rank 0 of the target, after each verification.

    Its proposals arrive ahead of the verdicts that they continue, without a request; no round ever
    waits for them.
    """

    def __init__(self, target: RemoteTarget) -> None:
        self._prepared: dict[int, PreparedProposal] = {}  # the latest, by sequence
        target.on_prepared = self._on_prepared

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Awaitable[Sequence[Proposal]]:
        """Return the proposals that have arrived, and empty ones for the other steps."""
        return _completed([self._find(step) for step in steps])

    async def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._prepared.pop(seq_id, None)

    def _on_prepared(self, message: PreparedProposals) -> None:
        self._prepared.update(
            {prepared.proposal.seq_id: prepared for prepared in message.prepared_proposals}
        )

    def _find(self, step: DraftStep) -> Proposal:
        stop, prepared = step.stop, self._prepared.get(step.seq_id)
        if (
            not step.gamma
            or prepared is None
            or (prepared.proposal.start, prepared.token) != (stop, step.tokens[-1])
        ):
            return Proposal(step.seq_id, stop, (), None, stop)
        return replace(_truncated(prepared.proposal, step.gamma), num_cached=stop + step.gamma)


def _mark_retrieved(answer: asyncio.Future[Sequence[Proposal]]) -> None:
    """Retrieve an exception, so that asyncio does not log one that comes after the last round."""
    if not answer.cancelled():
        answer.exception()


async def _completed(proposals: Sequence[Proposal]) -> Sequence[Proposal]:
    return proposals


def _no_drafts(steps: Sequence[DraftStep], *, is_attached: bool) -> list[Proposal]:
    """Return proposals without draft tokens.

    An attached worker still has the KV cache that the steps build on; a lost one has nothing.
    """
    return [
        Proposal(step.seq_id, step.stop, (), None, step.start if is_attached else 0)
        for step in steps
    ]


def _truncated(proposal: Proposal, gamma: int) -> Proposal:
    if len(proposal.tokens) <= gamma:
        return proposal
    q = proposal.q
    if q is not None:
        q = SparseDistribution(q.ids[:gamma], q.probs[:gamma])
    return replace(
        proposal,
        tokens=proposal.tokens[:gamma],
        q=q,
        num_cached=min(proposal.num_cached, proposal.start + max(0, gamma - 1)),
    )


def _total_seconds(spans: Sequence[Span]) -> float:
    """Return the busy time, which includes proposals prepared between two rounds."""
    return sum(span.end - span.start for span in spans)
