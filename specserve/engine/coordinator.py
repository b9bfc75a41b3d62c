"""Draft, verify, commit, for all running sequences at once. Knows neither tensors nor Ray: the workers are two small protocols."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import abc

from specserve.config import Config
from specserve.engine.batch import Batch
from specserve.engine.journal import Round
from specserve.engine.pacer import Pacer
from specserve.engine.scheduler import Scheduler
from specserve.engine.sequence import Sequence
from specserve.errors import BadValue, EmptyPrompt, Overloaded, TooLong, UnknownToken, WorkerLost
from specserve.types import VERIFIERS, Chunk, Drafter, DraftStep, Finish, ModelInfo, Policy, Proposal, Request, Target, Verdict, VerifyStep

log = logging.getLogger(__name__)

DEFAULT_VERIFIER = "block"
LONGEST_REST = 256  # rounds


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
    ) -> None:
        if gamma is not None and not 0 <= gamma <= max_gamma:
            raise BadValue(f"speculation.gamma must be between 0 and {max_gamma}, not {gamma}", param="speculation.gamma")
        if default_verifier not in VERIFIERS:
            raise BadValue(f"speculation.verifier must be one of {', '.join(VERIFIERS)}, not {default_verifier!r}", param="speculation.verifier")
        self.target = target
        self.drafter = drafter
        self.scheduler = Scheduler(
            info, max_running=max_running, max_queued=max_queued, max_batch_tokens=max_batch_tokens, max_gamma=0 if drafter is None else max_gamma
        )
        self.pacer = Pacer(0 if drafter is None else gamma, max_gamma=max_gamma, curve=info.curve)
        self._info = info
        self._context = min(info.max_context, info.num_pages * info.page_size)
        self._draft_limit = 0 if drafter is None else self._context if draft_context is None else draft_context
        self._max_gamma = max_gamma
        self._default_verifier = default_verifier
        self._lenience = lenience
        self._emit = emit
        self._report = report
        self.num_rounds = 0  # begun until now
        self.in_round_since: float | None = None  # by the clock; None between rounds
        self._clock = clock
        self._drafter_failures = 0  # in a row
        self._drafter_back = 0  # the round from which it is asked again
        self._next_id = 0
        self._live: dict[int, Sequence] = {}
        self._outbox: list[Chunk] = []  # of the round before
        self._done: Round | None = None  # likewise
        self._cancelled: list[int] = []
        self._closed = False
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
    ) -> Coordinator:
        """With the limits and the speculation of a config."""
        return cls(
            target,
            drafter,
            info=info,
            emit=emit,
            report=report,
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
        self._check(request)
        if self._closed:
            raise Overloaded("the engine is closing and takes no new requests")
        if not self.scheduler.can_queue:
            raise Overloaded("the queue is full; try again later")
        sequence = Sequence(
            self._next_id,
            request,
            self._policy(request),
            context=self._context,
            draft_limit=self._draft_limit,
            end_ids=self._info.end_ids,
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
        self._closed = True
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
                await asyncio.sleep(0)  # workers in this process may never yield; submit and cancel must get their turn
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
        self.scheduler.select()
        gammas = self.pacer.choose(self.scheduler.running)  # what would pay
        batch = self.scheduler.next_batch(gammas)  # what fits
        told = await self._release()
        if batch.rows:
            self.num_rounds += 1
            self.in_round_since = self._clock()
            chunks = await self._advance(batch, begun=self.in_round_since)
            self._tell()  # of what came before, had the target not been asked
            self._outbox = chunks
            self.in_round_since = None
        elif told:
            await self._settle()
        if not self._live:
            self._tell()

    async def _advance(self, batch: Batch, *, begun: float) -> list[Chunk]:
        proposals = await self._propose(batch.draft_steps())
        drafted, steps = self._clock(), batch.verify_steps(proposals)
        try:
            verifying = self.target.verify(steps)
            self._tell()
            verdicts = await verifying
            _check_verdicts(steps, verdicts)
        except Exception as error:  # a worker's failure, whatever it is, belongs to the requests of this batch
            return self._fail(batch, error)
        verified = self._clock()
        chunks = self._let_go(batch.commit(verdicts))  # the only place where sequences grow
        self.pacer.observe(batch, verdicts, draft_seconds=drafted - begun, verify_seconds=verified - drafted)
        if self._report is not None:
            num_committed = sum(len(chunk.tokens) for chunk in chunks)
            times = {"begun": begun, "drafted": drafted, "verified": verified, "ended": self._clock()}
            self._done = Round.of(batch, verdicts, self.pacer.decision, number=self.num_rounds, num_committed=num_committed, **times)
        return chunks

    def _tell(self) -> None:
        """Sends what the round before brought, and reports on it."""
        chunks, self._outbox = self._outbox, []
        done, self._done = self._done, None
        if chunks:
            self._emit(chunks)
        if done is not None and self._report is not None:
            self._report(done)

    async def _propose(self, steps: abc.Sequence[DraftStep]) -> abc.Sequence[Proposal]:
        """Without a drafter that answers, the round goes on with gamma 0. One that keeps failing is asked ever more seldom."""
        if self.drafter is None or not steps or self.num_rounds < self._drafter_back:
            return ()
        try:
            proposals = await self.drafter.propose(steps, self.pacer.deadline)
            _check_proposals(steps, proposals)
        except Exception:
            rest = min(max(1, 2**self._drafter_failures // 8), LONGEST_REST)  # the first few may be a mishap
            log.exception("the drafter failed; %d rounds go on without it", rest)
            self._drafter_failures, self._drafter_back = self._drafter_failures + 1, self.num_rounds + rest
            for sequence in self.scheduler.running:
                sequence.draft_held = 0  # nothing is known of what it still holds
            return ()
        self._drafter_failures = 0
        return proposals

    def _fail(self, batch: Batch, error: Exception) -> list[Chunk]:
        """Ends the batch's requests; the others go on. A restart with a replay of the batch would take this place."""
        log.error("the target failed; %d requests end", len(batch.rows), exc_info=error)
        message = str(error) or type(error).__name__
        return self._let_go([row.sequence.end(Finish.ERROR, error=message) for row in batch.rows])

    async def _settle(self) -> None:
        """A round of nothing: workers that hear of releases with their next steps hear of them now, though there are none."""
        if self.drafter is not None:
            await _unless_it_fails("the drafter to settle", self.drafter.propose((), math.inf))
        await _unless_it_fails("the target to settle", self.target.verify(()))

    async def _release(self) -> bool:
        """Tells the workers, before they need the room, which sequences they may forget; whether there were any."""
        released, self.scheduler.released = self.scheduler.released, []
        if not released:
            return False
        for worker in (self.target, self.drafter):
            if worker is not None:
                await _unless_it_fails(f"{type(worker).__name__} to release {len(released)} sequences", worker.release(released))
        return True

    def _end_unwanted(self) -> list[Chunk]:
        """Ends what was cancelled, or everything when closed; their pages are free for the round that begins."""
        if self._closed:
            chunks = [sequence.end(Finish.ERROR, error="the engine was closed") for sequence in self._live.values()]
        else:
            unwanted = [self._live[seq_id] for seq_id in dict.fromkeys(self._cancelled) if seq_id in self._live]
            chunks = [sequence.end(Finish.CANCELLED) for sequence in unwanted]
        self._cancelled.clear()
        return self._let_go(chunks)

    def _let_go(self, chunks: list[Chunk]) -> list[Chunk]:
        """Forgets the sequences whose last chunk this is; their pages are released when the next round begins."""
        finished = [chunk.seq_id for chunk in chunks if chunk.finish]
        for seq_id in finished:
            del self._live[seq_id]
        if finished:
            self.scheduler.sweep()
        return chunks

    def _check(self, request: Request) -> None:
        prompt, gamma = request.prompt, request.speculation.gamma
        if not prompt:
            raise EmptyPrompt("the prompt is empty; it needs at least one token")
        if min(prompt) < 0 or max(prompt) >= self._info.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < self._info.vocab_size)
            raise UnknownToken(f"the prompt has token id {wrong}, but the vocabulary ends at {self._info.vocab_size - 1}")
        if len(prompt) >= self._context:
            raise TooLong(f"the prompt has {len(prompt)} tokens, but the context holds {self._context}, new tokens included")
        if request.max_tokens < 1:
            raise BadValue(f"max_tokens must be 1 or more, not {request.max_tokens}", param="max_tokens")
        if gamma is not None and gamma > self._max_gamma:
            raise BadValue(f"speculation.gamma must be at most {self._max_gamma}, not {gamma}", param="speculation.gamma")

    def _policy(self, request: Request) -> Policy:
        """A seeded request gets `coupled`, whose text depends on the seed and the target alone, unless it asks for another."""
        verifier = request.speculation.verifier or ("coupled" if request.seeded else self._default_verifier)
        return Policy(
            warp=request.warp,
            verifier=verifier,
            seed=request.seed,
            prompt_length=len(request.prompt),
            logprobs=request.logprobs,
            lenience=self._lenience if verifier == "lenient" else 1.0,
        )


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
        if proposal.tokens and (proposal.start != step.start + len(step.tokens) or len(proposal.tokens) > step.gamma):
            raise WorkerLost(f"the drafter's proposal for sequence {step.seq_id} does not fit its step")


def _check_verdicts(steps: abc.Sequence[VerifyStep], verdicts: abc.Sequence[Verdict]) -> None:
    steps = [step for step in steps if step.decide]
    if [step.seq_id for step in steps] != [verdict.seq_id for verdict in verdicts]:
        raise WorkerLost("the target judged other sequences than were asked for")
    for step, verdict in zip(steps, verdicts, strict=True):
        if not 0 <= verdict.accepted <= len(step.drafts):
            raise WorkerLost(f"the target's verdict on sequence {step.seq_id} does not fit its step")
