"""Implement the coordinator's Target and Drafter over links, with one message each way per round.

Workers may be lost and replaced. Meanwhile a round waits for its target but goes on without its
drafter.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from specserve.cluster.engine.clocks import ClockAlignment
from specserve.cluster.engine.hidden_relay import HiddenRelay
from specserve.cluster.engine.pass_watch import DraftWatch, PassWatch
from specserve.cluster.engine.remote_calls import (
    all_answers,
    are_held,
    can_go_on,
    expect_answer,
    failed,
    reason_of,
    send_call,
)
from specserve.cluster.transport.link import Client
from specserve.engine.trace import Exchange
from specserve.errors import Displaced, SpecserveError, TargetReplaced, WorkerLost
from specserve.types import (
    DraftStep,
    PreparedProposal,
    Proposal,
    Span,
    SparseDistribution,
    Verdict,
    VerifyStep,
)
from specserve.wire.messages import PreparedProposals, Proposals, Propose, Verdicts, Verify

log = logging.getLogger(__name__)

ReportExchange = Callable[[Exchange], None]
OnLost = Callable[[str], None]

MIN_WAIT_S = 0.1
"""Shortest time that a round waits for its drafter before it goes on without drafts."""
WAIT_FACTOR = 4.0
"""Multiple of the drafter's mean answer time that a round waits."""
MIN_PUSH_WAIT_S = 0.5
"""The same for proposals that the target's worker pushes, which only a broken link delays."""
INITIAL_ANSWER_S = 0.1
ANSWER_BLEND = 0.1
"""Weight of the newest answer in the mean answer time."""


class RemoteTarget:
    """Target whose ranks all get the same message. Rank 0 answers with the verdicts.

    The other ranks' answers only confirm that they have run the same pass. A round succeeds on all
    ranks or loses all of them: one that fails leaves the others in the middle of a collective. Only
    a rank without others may fail a round and go on, with a SpecserveError.
    """

    def __init__(
        self,
        *,
        deadline_s: float,
        report: ReportExchange | None = None,
        watch: PassWatch | None = None,
        relay: HiddenRelay | None = None,
    ) -> None:
        """Create a target; the relay gets the hidden states that come with verdicts."""
        self._deadline_s, self._report = deadline_s, report
        self._relay = relay or HiddenRelay()
        self.watch = watch or PassWatch()
        self._ranks: tuple[Client, ...] = ()
        # Set while there are ranks, and once it is known that there will be none.
        self._attached = asyncio.Event()
        self._final_error: Displaced | None = None
        self._clocks = ClockAlignment()
        self._number = 0
        self._released: list[int] = []
        self._held: set[int] = set()  # sequences that these ranks have in their caches
        self.on_lost: OnLost = log.error  # called with the reason when a rank is lost
        # Called with the proposals that rank 0 sends ahead, if it drafts.
        self.on_prepared: Callable[[PreparedProposals], None] | None = None
        self.has_answered = False  # since these ranks were attached
        self.busy_seconds = 0.0  # of rank 0
        self.pushing_round: int | None = None  # the last one that proposals follow
        self.pages_used = self.prefix_queries = self.prefix_hits = 0
        self._lost_prefix_counts = (0, 0)  # counts of ranks that are gone

    def attach(self, ranks: Sequence[Client]) -> None:
        """Use these ranks from now on. Their KV caches are empty."""
        self._ranks, self._clocks, self.has_answered = tuple(ranks), ClockAlignment(), False
        self._ranks[0].on_prepared = self.on_prepared
        self.watch.restart()
        self._lost_prefix_counts = (self.prefix_queries, self.prefix_hits)
        self._released.clear()
        self._held.clear()
        self._attached.set()

    def detach(self) -> None:
        """Drop the ranks; rounds wait until others are attached."""
        self._ranks, self.pages_used, self.pushing_round = (), 0, None
        self._attached.clear()

    def give_up(self, error: Displaced) -> None:
        """Make every round raise `error`, since there will be no other ranks."""
        self._final_error = error
        self._attached.set()

    def verify(self, steps: Sequence[VerifyStep]) -> Awaitable[Sequence[Verdict]]:
        """Send the steps to all ranks before returning, or once ranks are attached again."""
        if not self._ranks:
            return self._verify_once_attached(steps)
        if not are_held(steps, self._held):
            return failed(TargetReplaced("the target was lost between two rounds"))
        self._held.update(step.seq_id for step in steps)
        self._number += 1
        message = Verify(self._number, tuple(steps), tuple(self._released))
        self.pushing_round = self._number if message.wants_drafts else None
        self._released.clear()
        sent = time.perf_counter()
        calls = [
            expect_answer(Verdicts, send_call(rank, message, self._deadline_s), "the target")
            for rank in self._ranks
        ]
        return self._verdicts(self._ranks, message, calls, sent)

    async def release(self, seq_ids: Sequence[int]) -> None:
        """Release the sequences with the next round's message."""
        self._released += seq_ids
        self._held.difference_update(seq_ids)

    async def _verify_once_attached(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        await self._attached.wait()
        if self._final_error is not None:
            raise self._final_error
        return await self.verify(steps)

    async def _verdicts(
        self,
        ranks: tuple[Client, ...],
        message: Verify,
        calls: Sequence[Coroutine[Any, Any, Verdicts]],
        sent: float,
    ) -> Sequence[Verdict]:
        try:
            answers = await all_answers(calls)
        except Exception as error:
            self.pushing_round = None
            raise self._failure(ranks, error) from error
        first = answers[0]
        queries, hits = self._lost_prefix_counts
        self.pages_used, self.prefix_queries, self.prefix_hits = (
            first.pages_used,
            queries + first.prefix_queries,
            hits + first.prefix_hits,
        )
        self._relay.add(first.hidden)
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
        too_slow = self.watch.observe(message.steps, answers)
        if too_slow is not None and ranks is self._ranks:
            self._report_lost(too_slow)
        return first.verdicts

    def _failure(self, ranks: tuple[Client, ...], error: Exception) -> SpecserveError:
        """Return the error of a failed round; drop its ranks unless the only one can go on."""
        if len(ranks) == 1 and can_go_on(error):
            return error
        if ranks is self._ranks:
            self._report_lost(reason_of(error))
        return error if isinstance(error, WorkerLost) else WorkerLost(reason_of(error))

    def _report_lost(self, reason: str) -> None:
        self.detach()
        self.on_lost(reason)


class RemoteDrafter:
    """Drafter in another process, which sends likely next proposals in advance.

    A round whose proposals have all been prepared uses them and does not wait for its answer. A
    drafter that is away, or takes unusually long, gives no draft tokens, and no round waits for it.
    It is called again once it has answered.
    """

    def __init__(
        self,
        *,
        deadline_s: float,
        report: ReportExchange | None = None,
        watch: DraftWatch | None = None,
        relay: HiddenRelay | None = None,
    ) -> None:
        """Create a drafter, which is sent the hidden states of the relay."""
        self._deadline_s, self._report = deadline_s, report
        self._watch = watch or DraftWatch()
        self._relay = relay or HiddenRelay()
        self._worker: Client | None = None
        self._clocks = ClockAlignment()
        self._number = 0
        self._released: list[int] = []
        self._held: set[int] = set()  # sequences that this worker has in its cache
        # By sequence, start of the proposal, and the token before it.
        self._prepared: dict[tuple[int, int, int], Proposal] = {}
        # Answer of a round that used prepared proposals instead of waiting for it.
        self._pending_answer: asyncio.Future[Sequence[Proposal]] | None = None
        self._mean_answer_s = INITIAL_ANSWER_S  # kept when the worker is replaced
        self.on_lost: OnLost = log.error  # called with the reason when the worker is lost
        self.has_answered = False
        self.busy_seconds = 0.0
        self.pages_used = 0

    @property
    def is_away(self) -> bool:
        """True while no worker is attached."""
        return self._worker is None

    def attach(self, workers: Sequence[Client]) -> None:
        """Use this worker from now on. Its KV cache is empty."""
        (self._worker,) = workers
        self._worker.on_prepared = self._on_prepared
        self._clocks, self.has_answered = ClockAlignment(), False
        self._watch.restart()
        self._released.clear()
        self._held.clear()

    def detach(self) -> None:
        """Drop the worker; rounds go on without draft tokens."""
        self._worker, self._pending_answer, self.pages_used = None, None, 0
        self._prepared.clear()
        self._held.clear()

    def give_up(self, error: Displaced) -> None:
        """Do nothing: rounds go on without draft tokens."""

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Awaitable[Sequence[Proposal]]:
        """Propose draft tokens for the steps: the prepared ones, or else the worker's answer.

        Sends the request before returning, unless the previous answer is still outstanding; then it
        is sent when that answer arrives.
        """
        worker = self._worker
        if worker is None or worker.is_late or not are_held(steps, self._held):
            return _completed(_no_drafts(steps, self._held))
        known = self._find_all(steps)
        self._prepared.clear()
        pending, self._pending_answer = self._pending_answer, None
        if pending is not None and not pending.done():
            return self._ask_after(pending, worker, steps, deadline)
        if pending is not None:
            pending.result()  # an exception of that answer is raised by this round
        answer = self._ask(worker, steps, deadline)
        if known is None:
            return answer
        self._pending_answer = asyncio.ensure_future(answer)
        self._pending_answer.add_done_callback(_mark_retrieved)
        return _completed(known)

    async def release(self, seq_ids: Sequence[int]) -> None:
        """Release the sequences with the next round's message."""
        self._released += seq_ids
        self._held.difference_update(seq_ids)
        self._relay.release(seq_ids)

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

        A proposal prepared for a smaller gamma is not used: the worker is called instead. A step
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
        self,
        pending: asyncio.Future[Sequence[Proposal]],
        worker: Client,
        steps: Sequence[DraftStep],
        deadline: float,
    ) -> Sequence[Proposal]:
        """Wait for the pending answer, then ask: a link carries one call at a time."""
        await pending
        if worker is not self._worker or worker.is_late:
            return _no_drafts(steps, self._held if worker is self._worker else set())
        return await self._ask(worker, steps, deadline)

    def _ask(
        self, worker: Client, steps: Sequence[DraftStep], deadline: float
    ) -> Awaitable[Sequence[Proposal]]:
        self._held.update(step.seq_id for step in steps)
        self._number += 1
        message = Propose(
            self._number, deadline, tuple(steps), tuple(self._released), self._relay.take()
        )
        self._released.clear()
        sent = time.perf_counter()
        timeout_s = min(self._deadline_s, max(MIN_WAIT_S, WAIT_FACTOR * self._mean_answer_s))
        call = expect_answer(Proposals, send_call(worker, message, timeout_s), "the drafter")
        return self._proposals(worker, call, steps, sent)

    async def _proposals(
        self,
        worker: Client,
        call: Awaitable[Proposals],
        steps: Sequence[DraftStep],
        sent: float,
    ) -> Sequence[Proposal]:
        try:
            answer = await call
        except Exception as error:
            if can_go_on(error):
                raise  # the worker goes on; the next steps start at 0
            return self._handle_loss(worker, steps, reason_of(error))
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
        too_slow = self._watch.observe(steps, answer)
        if too_slow is not None and worker is self._worker:
            self._report_lost(too_slow)
        return answer.proposals

    def _handle_loss(
        self, worker: Client, steps: Sequence[DraftStep], reason: str
    ) -> Sequence[Proposal]:
        """Return empty proposals after a call failed, and report the worker if it is lost.

        A worker that is late may only be slow: the next round waits longer, and the worker counts
        as lost if it has still not answered after the deadline.
        """
        if worker is not self._worker:
            return _no_drafts(steps, set())
        if not worker.is_late:
            self._report_lost(reason)
            return _no_drafts(steps, self._held)
        log.warning("a round goes on without its drafts: %s", reason)
        self._mean_answer_s *= 1.5
        self._number += 1  # what it prepares after its late answer continues another text
        asyncio.get_running_loop().call_later(
            self._deadline_s, self._report_if_late, worker, self._number, reason
        )
        return _no_drafts(steps, self._held)

    def _report_if_late(self, worker: Client, number: int, reason: str) -> None:
        """Report the worker as lost if it has not answered since; nothing was sent meanwhile."""
        if worker is self._worker and worker.is_late and self._number == number:
            self._report_lost(reason)

    def _report_lost(self, reason: str) -> None:
        self.detach()
        self.on_lost(reason)


class PushedProposals:
    """Drafter that runs on rank 0 of the target, after each verification.

    Its proposals arrive after the verdicts that they continue, without a request. A round waits
    for them, but goes on without if they take unusually long or were lost.
    """

    def __init__(self, target: RemoteTarget) -> None:
        self._target = target
        self._prepared: dict[int, PreparedProposal] = {}  # the latest, by sequence
        self._arrived: int | None = None  # round of the latest
        self._arrival: asyncio.Future[None] | None = None  # while a round waits
        self._mean_wait_s = 0.0
        target.on_prepared = self._on_prepared

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Awaitable[Sequence[Proposal]]:
        """Return the proposals that the last verdicts were followed by, and else empty ones."""
        if self._target.pushing_round in (None, self._arrived):
            return _completed(self._find_all(steps))
        return self._propose_once_arrived(steps)

    async def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._prepared.pop(seq_id, None)

    async def _propose_once_arrived(self, steps: Sequence[DraftStep]) -> Sequence[Proposal]:
        began = time.perf_counter()
        self._arrival = asyncio.get_running_loop().create_future()
        patience = max(MIN_PUSH_WAIT_S, WAIT_FACTOR * self._mean_wait_s)
        await asyncio.wait([self._arrival], timeout=patience)
        self._arrival = None
        self._mean_wait_s += ANSWER_BLEND * (time.perf_counter() - began - self._mean_wait_s)
        return self._find_all(steps)

    def _on_prepared(self, message: PreparedProposals) -> None:
        if message.number != self._target.pushing_round:
            return  # a round has gone on without it
        self._arrived = message.number
        self._prepared.update(
            {prepared.proposal.seq_id: prepared for prepared in message.prepared_proposals}
        )
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _find_all(self, steps: Sequence[DraftStep]) -> list[Proposal]:
        return [self._find(step) for step in steps]

    def _find(self, step: DraftStep) -> Proposal:
        """Return the proposal after the step; the worker itself keeps count of what it has cached.

        So all positions count as cached here, and no step repeats a token.
        """
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


def _no_drafts(steps: Sequence[DraftStep], held: AbstractSet[int]) -> list[Proposal]:
    """Return proposals without draft tokens.

    The worker still has the KV cache that the steps of held sequences build on.
    """
    return [
        Proposal(step.seq_id, step.stop, (), None, step.start if step.seq_id in held else 0)
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
