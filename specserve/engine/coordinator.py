"""The loop of the engine: schedule, propose, verify, commit and emit, for all sequences at once.

One round; docs/design/one-round.md has it whole, in forty lines of numpy:

    scheduler   picks the running sequences and what fits into the round     -> Batch
    pacer       says how many draft tokens pay for each sequence             -> gammas
    drafter     proposes draft tokens and their draft distribution q         -> Proposal
    target      computes p for all of them in one pass and verifies          -> Verdict
    Sequence    commits the accepted tokens, and a correction or the bonus   -> Chunk
    emit        sends the chunks, while the target is busy with the next round

Knows neither tensors nor Ray: the workers are two small protocols.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import abc

from specserve.config.sections import LimitsConfig, SpeculationConfig
from specserve.engine.admission import Admission
from specserve.engine.batch import Batch, DraftedBatch
from specserve.engine.budget import TokenBudget
from specserve.engine.crash_tracker import MAX_STALLED_ROUNDS, CrashTracker
from specserve.engine.pacer import Pacer
from specserve.engine.scheduler import Scheduler
from specserve.engine.sequence import Sequence
from specserve.engine.trace import Round
from specserve.engine.workers import WorkerPair, ignore_failure
from specserve.errors import (
    BadValue,
    Displaced,
    Overloaded,
    TargetReplaced,
    WorkerLost,
    first_line,
)
from specserve.types import Chunk, Drafter, FinishReason, ModelInfo, Request, Target, Verdict

log = logging.getLogger(__name__)


class Coordinator:
    """The requests of one engine, from `submit` to their last chunk.

    `emit` is called once a round with all chunks of that round. Every request gets a final chunk.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        info: ModelInfo,
        limits: LimitsConfig,
        speculation: SpeculationConfig,
        emit: abc.Callable[[abc.Sequence[Chunk]], None],
        report: abc.Callable[[Round], None] | None = None,
        clock: abc.Callable[[], float] = time.perf_counter,
        draft_context: int | None = None,  # None: as long as the target's
        remote_workers: bool = False,  # both can be busy at the same time
        drafts_prompts: bool = True,  # the drafter reads them while the target does
        # Called with the id of a sequence that gives its place in a full queue to another client's,
        # and gets no chunk; None: a full queue stays as it is.
        on_displaced: abc.Callable[[int], None] | None = None,
    ) -> None:
        self._on_displaced = on_displaced
        self._admission = Admission(info, speculation)
        gamma, max_gamma = speculation.gamma, speculation.max_gamma
        if gamma is not None and not 0 <= gamma <= max_gamma:
            raise BadValue(
                f"speculation.gamma must be between 0 and {max_gamma}, not {gamma}",
                param="speculation.gamma",
            )
        if drafter is None:
            gamma, draft_context = 0, 0
        self.scheduler = Scheduler(
            info,
            max_running=limits.max_running,
            max_queued=limits.max_queued,
            budget=TokenBudget.from_curve(limits.max_batch_tokens, info.curve),
            max_gamma=0 if drafter is None else max_gamma,
            drafts_prompts=drafts_prompts,
        )
        self.pacer = Pacer(gamma, max_gamma=max_gamma, curve=info.curve, runs_ahead=info.runs_ahead)
        self.num_rounds = 0  # started so far
        self.in_round_since: float | None = None  # by the clock; None between rounds
        self.can_resume_elsewhere = False  # True if requests that end with an error may do so
        self.trouble: str | None = None  # why this engine has given up
        self._workers = WorkerPair(target, drafter)
        self._remote_workers = remote_workers
        self._crash_tracker = CrashTracker()
        self._info = info
        self._draft_limit = self._admission.context if draft_context is None else draft_context
        self._emit, self._report, self._clock = emit, report, clock
        self._next_id = 0
        self._live: dict[int, Sequence] = {}
        self._outbox: list[Chunk] = []  # of the last round
        self._last_round: Round | None = None  # not reported yet
        self._verified_at: float | None = None  # when the last verdicts came
        self._cancelled: list[int] = []
        self._closed = self._paused = False
        self._wake = asyncio.Event()

    def submit(self, request: Request) -> int:
        """Queue the request and return its sequence's id, or raise if it cannot be served."""
        self._admission.check(request)
        if self._closed:
            raise Displaced(self.trouble or "the engine is closing and takes no new requests")
        if not self.scheduler.can_queue:
            self._make_room(request.client)
        sequence = Sequence(
            self._next_id,
            request,
            self._admission.policy(request),
            context=self._admission.max_length(request),
            draft_limit=self._draft_limit,
            end_ids=self._info.end_ids,
            decoder_start=self._info.decoder_start,
            irreproducible=self._info.irreproducible,
        )
        sequence.queued_at = self._clock()
        self._next_id += 1
        self._live[sequence.seq_id] = sequence
        self.scheduler.queue(sequence)
        self._wake.set()
        return sequence.seq_id

    def _make_room(self, client: str) -> None:
        """Displace the newest waiting sequence of a client with more than its share, or raise."""
        if self._on_displaced is not None:
            displaced = self.scheduler.displace_for(client)
            if displaced is not None:
                del self._live[displaced.seq_id]
                self._on_displaced(displaced.seq_id)
                return
        raise Overloaded("the queue is full; try again later")

    def cancel(self, seq_id: int) -> None:
        """End the sequence and free its pages when the next round begins.

        Ids of finished or unknown sequences are ignored.
        """
        if seq_id in self._live:
            self._cancelled.append(seq_id)

    def close(self) -> None:
        """Take no more requests, end those that are running with an error, and let `run` return.

        They end when the next round begins.
        """
        self._closed = self.can_resume_elsewhere = True
        self.resume()

    def pause(self) -> None:
        """Begin no round until `resume`; sequences stay as they are."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._wake.set()

    @property
    def has_work(self) -> bool:
        """True if a round would do anything: chunks to emit, or pages to release, included."""
        return bool(self._live or self.scheduler.released or self._outbox)

    async def run(self) -> None:
        """Run rounds while there is work, until closed or until the engine gives up.

        The chunks of a round are emitted while the target is busy with the next one. An exception
        that no worker raised ends the engine at once: what state it has left is not known.
        """
        while not self._closed or self.has_work:
            if self.has_work and not self._paused:
                try:
                    await self._round()
                except Exception as error:
                    self._send_back(f"the coordinator failed: {first_line(error)}", error)
                    self._emit_outbox()
                    return
                # Workers in this process may never yield; submit and cancel must get their turn.
                await asyncio.sleep(0)
            else:
                self._emit_outbox()  # of the round before a pause
                self._wake.clear()
                await self._wake.wait()

    async def round(self) -> None:
        """Schedule, propose, verify, commit and emit once."""
        await self._round()
        self._emit_outbox()

    async def _round(self) -> None:
        """Run one round, and leave its chunks in the outbox if another round will emit them."""
        self._outbox += self._end_cancelled()
        batch = self._schedule()
        released = await self._release()  # before the workers need the room
        if batch.entries:
            self.num_rounds += 1
            self.in_round_since = self._clock()
            try:
                await self._run_workers(batch)
            finally:
                self.in_round_since = None
        else:
            if released:
                await self._workers.flush_releases()
            if self._live:
                self._crash_tracker.record_stall()
                self._give_up_if_at_fault("nothing can be scheduled")
        if not self._live:
            self._emit_outbox()

    async def _run_workers(self, batch: Batch) -> None:
        """Propose for the batch, verify it, and commit the verdicts."""
        if not self._remote_workers:
            self._emit_outbox()  # no pass of the target would hide it, but drafting may
        drafted = await self._propose(batch)
        verdicts = await self._verify(drafted)
        if verdicts is not None:
            self._commit(drafted, verdicts)

    def _schedule(self) -> Batch:
        self.scheduler.select_running()
        running = self.scheduler.running
        gammas = self.pacer.choose(running)  # what would pay
        isolated = self._crash_tracker.next_to_isolate(running)
        return self.scheduler.next_batch(gammas, isolated=isolated)  # what fits

    async def _propose(self, batch: Batch) -> DraftedBatch:
        """Request proposals; after a failure of the drafter the batch has none."""
        started_at = self._clock()
        for entry in batch.entries:
            if entry.sequence.started_at is None:
                entry.sequence.started_at = started_at
        proposals = await self._workers.propose(batch.draft_steps(), self.pacer.deadline)
        if proposals is None:
            for sequence in self.scheduler.running:
                sequence.draft_cached = 0
        return DraftedBatch(batch, batch.verify_steps(proposals or ()), started_at, self._clock())

    async def _verify(self, drafted: DraftedBatch) -> abc.Sequence[Verdict] | None:
        """Return the target's verdicts, or None if it failed; emit the last round meanwhile."""
        verifying = self._workers.verify(drafted.steps)
        try:
            self._emit_outbox()
        except Exception:
            await ignore_failure("the target to verify", verifying)  # a worker takes one call
            raise
        try:
            return await verifying
        except Displaced as error:
            self._send_back(str(error), error)
        except Exception as error:  # the requests of this batch may be the cause, whatever it is
            self._recover(drafted.batch, error)
        return None

    def _commit(self, drafted: DraftedBatch, verdicts: abc.Sequence[Verdict]) -> None:
        verified_at = self._clock()
        batch, outcomes = drafted.batch, drafted.batch.outcomes(verdicts)
        self._outbox = self._drop_finished(batch.commit(verdicts, verified_at))
        self._crash_tracker.record_success()
        self.pacer.observe(
            batch,
            outcomes,
            draft_seconds=drafted.drafted_at - drafted.started_at,
            verify_seconds=verified_at - drafted.drafted_at,
            round_seconds=None if self._verified_at is None else verified_at - self._verified_at,
        )
        self._verified_at = verified_at
        if self._report is not None:
            self._last_round = Round(
                self.num_rounds,
                start=drafted.started_at,
                drafted_at=drafted.drafted_at,
                verified_at=verified_at,
                end=self._clock(),
                num_sequences=len(batch.entries),
                num_positions=batch.num_positions,
                num_prompt_tokens=batch.num_prompt_tokens,
                outcomes=outcomes,
                num_committed=sum(len(chunk.tokens) for chunk in self._outbox),
                decision=self.pacer.decision,
            )

    def _emit_outbox(self) -> None:
        """Emit the chunks of the last round, and report on it."""
        if self._outbox:
            self._emit(self._outbox)
            self._outbox = []
        done, self._last_round = self._last_round, None
        if done is not None and self._report is not None:
            try:
                self._report(done)
            except Exception:  # a round that is missing in the trace harms no text
                log.exception("round %d was not reported", done.number)

    def _recover(self, batch: Batch, error: Exception) -> None:
        """Recompute everything that runs, and fail a request or the engine if one is the cause.

        The target's cache is gone, or not to be relied on. A request that the target crashed on
        several times, the last time alone, is the cause.
        """
        log.error(
            "the target failed in a pass of %d sequences; they are recomputed",
            len(batch.entries),
            exc_info=error,
        )
        for sequence in self.scheduler.running:
            sequence.reset_caches()
        if isinstance(error, TargetReplaced):
            return
        cause = first_line(error)
        culprit = self._crash_tracker.record_crash(
            [entry.sequence for entry in batch.entries], target_lost=isinstance(error, WorkerLost)
        )
        if not self._give_up_if_at_fault(cause, error) and culprit is not None:
            num_crashes = self._crash_tracker.num_crashes(culprit.seq_id)
            message = f"the target failed {num_crashes} times over this request: {cause}"
            self._outbox += self._drop_finished([culprit.end(FinishReason.ERROR, error=message)])

    def _give_up_if_at_fault(self, cause: str, error: Exception | None = None) -> bool:
        """Send all requests back if rounds make no progress and no request is to blame for it."""
        if not self._crash_tracker.is_engine_at_fault:
            return False
        why = f"no progress in {MAX_STALLED_ROUNDS} rounds: {cause}"
        self._send_back(why, error)
        return True

    def _send_back(self, why: str, error: Exception | None) -> None:
        """End all requests, since this engine cannot go on; another one may resume them.

        They resume after the tokens that were received, so unsent tokens are dropped.
        """
        log.error(
            "the engine gives up: %s; %d requests are sent back",
            why,
            len(self._live),
            exc_info=error,
        )
        self.trouble = why
        self.can_resume_elsewhere = self._closed = True
        sent_last = [chunk for chunk in self._outbox if chunk.seq_id not in self._live]
        self._outbox = sent_last + self._end_cancelled()

    async def _release(self) -> bool:
        """Let the workers free the pages of ended and preempted sequences, if there are any."""
        released, self.scheduler.released = self.scheduler.released, []
        if not released:
            return False
        await self._workers.release(released)
        return True

    def _end_cancelled(self) -> list[Chunk]:
        """End what was cancelled, or everything when closed, and return the last chunks.

        Their pages are free for the round that begins.
        """
        if self._closed:
            chunks = [
                sequence.end(FinishReason.ERROR, error=self.trouble or "the engine was closed")
                for sequence in self._live.values()
            ]
        else:
            cancelled = [
                self._live[seq_id]
                for seq_id in dict.fromkeys(self._cancelled)
                if seq_id in self._live
            ]
            chunks = [sequence.end(FinishReason.CANCELLED) for sequence in cancelled]
        self._cancelled.clear()
        return self._drop_finished(chunks)

    def _drop_finished(self, chunks: list[Chunk]) -> list[Chunk]:
        """Drop the sequences whose last chunk is among these, and return the chunks.

        Their pages are released when the next round begins.
        """
        self._crash_tracker.clear(chunk.seq_id for chunk in chunks if chunk.tokens or chunk.finish)
        finished = [chunk.seq_id for chunk in chunks if chunk.finish]
        for seq_id in finished:
            del self._live[seq_id]
        if finished:
            self.scheduler.remove_finished()
        return chunks
