"""Draft, verify, commit, for all running sequences at once. Knows neither tensors nor Ray: the workers are two small protocols."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import abc
from dataclasses import dataclass, replace

from specserve.config.tree import Config
from specserve.engine.admission import DEFAULT_VERIFIER, Admission
from specserve.engine.batch import Batch
from specserve.engine.crash_tracker import MAX_DEATHS, Suspects
from specserve.engine.pacer import Pacer
from specserve.engine.scheduler import Scheduler
from specserve.engine.sequence import Sequence
from specserve.engine.trace import Round
from specserve.engine.workers import Crew
from specserve.errors import BadValue, Displaced, Overloaded
from specserve.types import Chunk, Drafter, Finish, ModelInfo, Request, Target, VerifyStep

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """A batch that has its proposals and waits for the target."""

    batch: Batch
    steps: abc.Sequence[VerifyStep]
    begun: float
    drafted: float
    draft_seconds: float


class Coordinator:
    """Takes requests by `submit`, answers by `emit`: once a round, all chunks of that round. Every request gets a final chunk."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        info: ModelInfo,
        emit: abc.Callable[[abc.Sequence[Chunk]], None],
        clock: abc.Callable[[], float] = time.perf_counter,
        max_running: int = 64,
        max_queued: int = 1024,
        max_batch_tokens: int = 512,
        gamma: int | None = None,
        max_gamma: int = 16,
        default_verifier: str = DEFAULT_VERIFIER,
        lenience: float = 1.0,
        draft_context: int | None = None,
        report: abc.Callable[[Round], None] | None = None,
        overlaps: bool = False,
    ) -> None:
        """`overlaps`: target and drafter are elsewhere, and can both be at work while this process waits."""
        self._admission = Admission(
            info, max_gamma=max_gamma, default_verifier=default_verifier, lenience=lenience
        )
        if gamma is not None and not 0 <= gamma <= max_gamma:
            raise BadValue(
                f"speculation.gamma must be between 0 and {max_gamma}, not {gamma}",
                param="speculation.gamma",
            )
        self._crew = Crew(target, drafter)
        self._overlaps = overlaps
        self.scheduler = Scheduler(
            info,
            max_running=max_running,
            max_queued=max_queued,
            max_batch_tokens=max_batch_tokens,
            max_gamma=0 if drafter is None else max_gamma,
        )
        self.pacer = Pacer(0 if drafter is None else gamma, max_gamma=max_gamma, curve=info.curve)
        self._info = info
        self._draft_limit = (
            0
            if drafter is None
            else self._admission.context
            if draft_context is None
            else draft_context
        )
        self._emit = emit
        self._report = report
        self.num_rounds = 0  # begun until now
        self.in_round_since: float | None = None  # by the clock; None between rounds
        self._clock = clock
        self._next_id = 0
        self._live: dict[int, Sequence] = {}
        self._ready: Ready | None = None  # a cohort that waits for its verification
        self._suspects = Suspects()
        self._outbox: list[Chunk] = []  # of the round before
        self._done: Round | None = None  # likewise
        self._cancelled: list[int] = []
        self._closed = False
        self.displaced = False  # whether what ends with an error may go on elsewhere
        self._wake = asyncio.Event()

    @classmethod
    def of(
        cls,
        config: Config,
        target: Target,
        drafter: Drafter | None,
        *,
        info: ModelInfo,
        emit: abc.Callable[[abc.Sequence[Chunk]], None],
        draft_context: int | None,
        report: abc.Callable[[Round], None] | None = None,
        overlaps: bool = False,
    ) -> Coordinator:
        """With the limits and the speculation of a config."""
        return cls(
            target,
            drafter,
            info=info,
            emit=emit,
            report=report,
            overlaps=overlaps,
            max_running=config.limits.max_running,
            max_queued=config.limits.max_queued,
            gamma=config.speculation.gamma,
            max_gamma=config.speculation.max_gamma,
            default_verifier=config.speculation.verifier or DEFAULT_VERIFIER,
            lenience=config.speculation.lenience,
            draft_context=draft_context,
        )

    def submit(self, request: Request) -> int:
        """Queues the request and returns its sequence's id; a request that cannot be served raises and leaves nothing behind."""
        self._admission.check(request)
        if self._closed:
            raise Displaced("the engine is closing and takes no new requests")
        if not self.scheduler.can_queue:
            raise Overloaded("the queue is full; try again later")
        sequence = Sequence(
            self._next_id,
            request,
            self._admission.policy(request),
            context=self._admission.room(request),
            draft_limit=self._draft_limit,
            end_ids=self._info.end_ids,
            decoder_start=self._info.decoder_start,
        )
        self._next_id += 1
        self._live[sequence.seq_id] = sequence
        self.scheduler.queue(sequence)
        self._wake.set()
        return sequence.seq_id

    def cancel(self, seq_id: int) -> None:
        """Ends the sequence and frees its pages when the next round begins. One that has finished, or never was, is ignored."""
        if seq_id in self._live:
            self._cancelled.append(seq_id)

    def close(self) -> None:
        """Takes no more requests. Those under way end with an error when the next round begins, and `run` returns."""
        self._closed = self.displaced = True
        self._wake.set()

    @property
    def has_work(self) -> bool:
        """Whether a round would do anything: chunks to emit, or pages to release."""
        return bool(self._live or self.scheduler.released or self._outbox)

    async def run(self) -> None:
        """Rounds for as long as there is work, until closed. What a round brought is told while the target is at the next one."""
        while not self._closed or self.has_work:
            if self.has_work:
                await self._round()
                await asyncio.sleep(
                    0
                )  # workers in this process may never yield; submit and cancel must get their turn
            else:
                self._wake.clear()
                await self._wake.wait()

    async def round(self) -> None:
        """Drafts, verifies and commits once for every sequence that fits, and tells of it."""
        await self._round()
        self._tell()

    async def _round(self) -> None:
        """Leaves its chunks in the outbox, if the next round will be there to send them."""
        self._outbox += self._end_unwanted()
        self.scheduler.select(None if self._ready is None else self._ready.batch)
        ready, self._ready = self._still_wanted(self._ready), None
        gammas = self.pacer.choose(self.scheduler.running)  # what would pay
        alone = self._suspects.alone(self.scheduler.running)
        split = self._overlaps and self.pacer.decision.cohorts == 2 and alone is None
        batch = self.scheduler.next_batch(  # what fits
            gammas,
            apart_from=None if ready is None else ready.batch,
            half=split and ready is None,
            alone=alone,
        )
        told = await self._release()
        if ready is not None:
            await self._in_turns(ready, batch)
        elif batch.rows:
            await self._one_by_one(batch, stop_early=split)
        elif told:
            await self._crew.settle()
        if not self._live:
            self._tell()

    async def _one_by_one(self, batch: Batch, *, stop_early: bool) -> None:
        """Drafts and verifies. Or drafts alone, for the cohort that is to be verified while the other is drafted for."""
        self._begin()
        ready = await self._draft(batch, self._clock())
        if stop_early:
            self._ready = ready
        else:
            await self._judge(ready)
        self.in_round_since = None

    async def _in_turns(self, ready: Ready, batch: Batch) -> None:
        """One cohort is verified while the other is drafted for; then they change places."""
        self._begin()
        drafting = asyncio.ensure_future(self._draft(batch, self._clock())) if batch.rows else None
        await asyncio.sleep(0)  # so that the drafter has its message before the target
        judged = await self._judge(replace(ready, begun=self._clock(), drafted=self._clock()))
        if drafting is not None:
            drafted = await drafting
            self._ready = (
                drafted if judged else None
            )  # a target that starts anew does not hold what those steps build on
        self.in_round_since = None

    def _begin(self) -> None:
        self.num_rounds += 1
        self.in_round_since = self._clock()

    async def _draft(self, batch: Batch, begun: float) -> Ready:
        proposals = await self._crew.propose(batch.draft_steps(), self.pacer.deadline)
        if proposals is None:
            for sequence in self.scheduler.running:
                sequence.draft_held = 0
        steps, drafted = batch.verify_steps(proposals or ()), self._clock()
        return Ready(batch, steps, begun, drafted, drafted - begun)

    async def _judge(self, ready: Ready) -> bool:
        """Tells of the round before while the target is at this one. False when the target was lost over it."""
        verifying = self._crew.verify(ready.steps)
        self._tell()
        try:
            verdicts = await verifying
        except (
            Exception
        ) as error:  # a worker's failure, whatever it is, may be due to the requests of this batch
            self._outbox = (
                self._displace(error)
                if isinstance(error, Displaced)
                else self._recover(ready.batch, error)
            )
            return False
        verified = self._clock()
        outcomes = ready.batch.outcomes(verdicts)
        chunks = self._outbox = self._let_go(
            ready.batch.commit(verdicts)
        )  # the only place where sequences grow
        self.pacer.observe(
            ready.batch,
            outcomes,
            draft_seconds=ready.draft_seconds,
            verify_seconds=verified - ready.drafted,
        )
        if self._report is not None:
            num_committed = sum(len(chunk.tokens) for chunk in chunks)
            times = {
                "begun": ready.begun,
                "drafted": ready.drafted,
                "verified": verified,
                "ended": self._clock(),
            }
            self._done = Round.of(
                ready.batch,
                outcomes,
                self.pacer.decision,
                number=self.num_rounds,
                num_committed=num_committed,
                **times,
            )
        return True

    def _still_wanted(self, ready: Ready | None) -> Ready | None:
        """Without the sequences that have ended since they were drafted for, or lost their place."""
        if ready is None:
            return None
        running = set(map(id, self.scheduler.running))
        kept = [row for row in ready.batch.rows if id(row.sequence) in running]
        if len(kept) < len(ready.batch.rows):
            ids = {row.sequence.seq_id for row in kept}
            ready.batch.rows = kept
            ready = replace(ready, steps=[step for step in ready.steps if step.seq_id in ids])
        return ready if kept else None

    def _tell(self) -> None:
        """Sends what the round before brought, and reports on it."""
        chunks, self._outbox = self._outbox, []
        done, self._done = self._done, None
        if chunks:
            self._emit(chunks)
        if done is not None and self._report is not None:
            self._report(done)

    def _recover(self, batch: Batch, error: Exception) -> list[Chunk]:
        """What the target held is gone, or not to be relied on: everything that runs is read again, from the committed tokens.

        A request that it died with again and again, the last time alone, is given up.
        """
        log.error(
            "the target failed in a pass of %d sequences; it starts anew",
            len(batch.rows),
            exc_info=error,
        )
        for sequence in self.scheduler.running:
            sequence.forget()
        blamed = self._suspects.blame([row.sequence for row in batch.rows])
        message = str(error) or type(error).__name__
        return self._let_go(
            [
                sequence.end(
                    Finish.ERROR,
                    error=f"the target failed {MAX_DEATHS} times over this request: {message}",
                )
                for sequence in blamed
            ]
        )

    def _displace(self, error: Exception) -> list[Chunk]:
        """This engine can do no more. Whoever sent the requests may know another."""
        log.error("the engine ends: %s; %d requests are sent back", error, len(self._live))
        self.displaced = self._closed = True
        return self._end_unwanted()

    async def _release(self) -> bool:
        """Tells the workers, before they need the room, which sequences they may forget; whether there were any."""
        released, self.scheduler.released = self.scheduler.released, []
        if not released:
            return False
        await self._crew.release(released)
        return True

    def _end_unwanted(self) -> list[Chunk]:
        """Ends what was cancelled, or everything when closed; their pages are free for the round that begins."""
        if self._closed:
            chunks = [
                sequence.end(Finish.ERROR, error="the engine was closed")
                for sequence in self._live.values()
            ]
        else:
            unwanted = [
                self._live[seq_id]
                for seq_id in dict.fromkeys(self._cancelled)
                if seq_id in self._live
            ]
            chunks = [sequence.end(Finish.CANCELLED) for sequence in unwanted]
        self._cancelled.clear()
        return self._let_go(chunks)

    def _let_go(self, chunks: list[Chunk]) -> list[Chunk]:
        """Forgets the sequences whose last chunk this is; their pages are released when the next round begins."""
        self._suspects.acquit(chunk.seq_id for chunk in chunks)
        finished = [chunk.seq_id for chunk in chunks if chunk.finish]
        for seq_id in finished:
            del self._live[seq_id]
        if finished:
            self.scheduler.sweep()
        return chunks
