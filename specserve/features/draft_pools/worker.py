"""A drafter that several engines share, each over a link of its own. Knows no Ray.

Engines join and leave while it runs. It drafts for all whose requests have arrived in the same
passes, which later requests join, and prepares their next proposals while it has none.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from specserve.cluster.transport.endpoint import LinkTiming
from specserve.cluster.transport.link import IsRunning, unknown
from specserve.cluster.transport.link_set import LinkSet
from specserve.drafters.registry import OpenDrafter
from specserve.errors import ConfigError, SpecserveError, WorkerLost
from specserve.features.draft_pools.drafter import EngineRound, PooledDrafter
from specserve.features.draft_pools.load import DraftLoad
from specserve.features.draft_pools.merged import MergedAnticipation
from specserve.features.draft_pools.shares import MAX_ENGINES, CacheShares
from specserve.types import ModelInfo, Proposal, Span
from specserve.wire.messages import Failure, PreparedProposals, Proposals, Propose

log = logging.getLogger(__name__)

SPIN_S = 0.02
"""Time after an answer for which it polls for messages without sleeping, as a draft worker does."""
EXAMINE_ENGINE_S = 1.0
"""Time between two examinations of an engine's process."""
POLL_S = 0.25
"""Longest sleep before it looks whether an engine has left, or whether to stop."""


@dataclass(frozen=True, slots=True)
class OpenedDraft:
    """Properties of the pool's drafter once it is loaded."""

    device: str
    context: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A round that is drafted for."""

    number: int
    since: float


class PoolWorker:
    """A drafter and its links. `run` lasts for its life; other threads call the other methods."""

    def __init__(
        self,
        open_drafter: Callable[[ModelInfo], OpenDrafter],
        host: str,
        *,
        page_size: int,
        max_places: int,
        timing: LinkTiming | None = None,
    ) -> None:
        """Listen on `host`; the drafter is opened for the target of the first engine.

        A batch has draft tokens for at most `max_places` sequences.
        """
        self._open_drafter, self._page_size, self._max_places = open_drafter, page_size, max_places
        self._links = LinkSet(host, timing=timing)
        self.address = self._links.address
        self.opened: Future[OpenedDraft] = Future()
        self.ended: Future[None] = Future()
        self.busy_seconds = {"draft": 0.0, "anticipate": 0.0}
        self.load = DraftLoad()
        # Stretches of passes between which no round waits, and the rounds that were answered.
        self.num_batches = self.num_rounds = 0
        self._lock = threading.Lock()
        self._engines: set[int] = set()
        self._moving: set[int] = set()  # engines that are to be requested to move
        self._last_engine = 0
        self._target: ModelInfo | None = None
        self._targets: queue.SimpleQueue[ModelInfo | None] = queue.SimpleQueue()
        self._left: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_stopping = threading.Event()
        self._idle_spans: dict[int, tuple[Span, ...]] = {}  # of engines, since their last answer
        self._waiting: dict[int, _Waiting] = {}  # rounds without an answer yet, by engine
        self._unrecorded_s = 0.0  # of drafting since the last answer
        self._numbers: dict[int, int] = {}  # last round of engines that may be sent proposals ahead

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    @property
    def engines(self) -> tuple[int, ...]:
        """Numbers of the engines that are members, in the order in which they joined."""
        with self._lock:
            return tuple(sorted(self._engines))

    def ask_to_move(self, engines: Iterable[int]) -> None:
        """Ask engines to move to another device of the pool; they stay while none takes them."""
        self._moving.update(engines)

    async def membership(
        self, client_key: bytes, target: ModelInfo, is_running: IsRunning = unknown
    ) -> AsyncGenerator[OpenedDraft, None]:
        """Admit an engine, yield once the drafter is loaded, and end with the pool.

        It yields again each time that the engine is to move to another device. The engine leaves
        by closing the generator. One that died cannot, so `is_running` examines its process.
        Raises what `join` and loading do.
        """
        engine = self.join(client_key, target)
        try:
            # An engine that leaves must not cancel what the others wait for.
            opened = await asyncio.shield(asyncio.wrap_future(self.opened))
            yield opened
            ended = asyncio.shield(asyncio.wrap_future(self.ended))
            while not ended.done() and await is_running() is not False:
                if engine in self._moving:
                    self._moving.discard(engine)
                    yield opened
                await asyncio.wait([ended], timeout=EXAMINE_ENGINE_S)
            if ended.done():
                ended.result()
        finally:
            self.leave(engine)

    def join(self, client_key: bytes, target: ModelInfo) -> int:
        """Admit an engine with this public key, and return its number here.

        Raises ConfigError if its target has another vocabulary than that of the first engine, and
        WorkerLost if the pool has ended.
        """
        with self._lock:
            if self._is_stopping.is_set() or self.ended.done():
                raise WorkerLost("the draft pool has ended, and another one replaces it")
            if self._target is None:
                self._target = target
                self._targets.put(target)
            elif _vocabulary(target) != _vocabulary(self._target):
                raise ConfigError(
                    "draft.pool is shared by targets of one vocabulary and the same end tokens, "
                    f"and one has {target.vocab_size} tokens and another "
                    f"{self._target.vocab_size}; give each its own draft.pool.name"
                )
            self._last_engine += 1
            engine = self._last_engine
            if engine >= MAX_ENGINES:
                raise WorkerLost("the pool has numbered all engines that it can; it is replaced")
            self._engines.add(engine)
        self._links.add(client_key, engine)
        return engine

    def leave(self, engine: int) -> None:
        """Release all that an engine has here."""
        with self._lock:
            self._engines.discard(engine)
        self._moving.discard(engine)
        self._links.remove(engine)
        self._left.put(engine)

    def stop(self) -> None:
        """Let `run` return; it closes the links."""
        self._is_stopping.set()
        self._targets.put(None)

    def run(self) -> None:
        """Open the drafter once an engine has joined, and answer rounds until `stop`."""
        try:
            target = self._targets.get()
            if target is not None:
                self._open_and_serve(target)
        except BaseException as error:
            log.exception("the draft pool has failed")
            if not self.opened.done():
                self.opened.set_exception(error)
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
        finally:
            self._links.close()

    def _open_and_serve(self, target: ModelInfo) -> None:
        drafter = self._open_drafter(target)
        ahead = MergedAnticipation(drafter.drafter, drafter.fanout, clock=time.perf_counter)
        pooled = PooledDrafter(
            ahead,
            CacheShares(drafter.num_pages, self._page_size),
            max_places=self._max_places,
        )
        self.opened.set_result(OpenedDraft(str(drafter.device), drafter.context, drafter.num_pages))
        spin_s = 0.0
        while not self._is_stopping.is_set():
            messages = self._links.receive(0.0 if pooled.is_drafting else POLL_S, spin_s=spin_s)
            self._release_left(pooled)
            rounds = {
                engine: message
                for engine, message in messages.items()
                if isinstance(message, Propose) and engine in self._engines
            }
            spin_s = SPIN_S if rounds or pooled.is_drafting else 0.0
            if spin_s:
                num_answered = self.num_rounds
                self._draft(pooled, rounds)
                if not pooled.is_drafting:
                    self._prepare(ahead)
                elif self.num_rounds > num_answered:
                    ahead.fork()
                self._send_prepared(pooled)

    def _release_left(self, pooled: PooledDrafter) -> None:
        while not self._left.empty():
            engine = self._left.get()
            pooled.remove_engine(engine)
            self._waiting.pop(engine, None)
            self._numbers.pop(engine, None)
            self._idle_spans.pop(engine, None)

    def _draft(self, pooled: PooledDrafter, rounds: Mapping[int, Propose]) -> None:
        """Take rounds, draft until one can be answered or another message arrives, and answer.

        A drafter that says what it could not do goes on; any other exception ends the worker.
        """
        start = time.perf_counter()
        self.num_batches += not pooled.is_drafting
        for engine, message in rounds.items():
            self._waiting[engine] = _Waiting(message.number, start)
            self._numbers.pop(engine, None)
        try:
            answers = pooled.propose(
                [
                    EngineRound(engine, message.steps, message.released, start + message.deadline)
                    for engine, message in rounds.items()
                ],
                self._links.has_message,
            )
        except SpecserveError as error:
            log.exception("rounds of %d engines failed", len(self._waiting))
            for engine, waiting in self._waiting.items():
                self._links.send(engine, Failure.from_error(waiting.number, error))
            self._waiting.clear()
            return
        ended = time.perf_counter()
        self.busy_seconds["draft"] += ended - start
        self._unrecorded_s += ended - start
        if answers:
            self._answer(pooled, answers, ended)

    def _answer(
        self, pooled: PooledDrafter, answers: Mapping[int, tuple[Proposal, ...]], now: float
    ) -> None:
        longest = 0.0
        for engine, proposals in answers.items():
            waiting = self._waiting.pop(engine)
            seconds = now - waiting.since
            self._links.send(
                engine,
                Proposals(
                    waiting.number,
                    proposals,
                    seconds,
                    pooled.num_pages_held(engine),
                    (*self._idle_spans.pop(engine, ()), Span("draft", waiting.since, now)),
                ),
            )
            self._numbers[engine] = waiting.number
            longest = max(longest, seconds)
        drafted = [one for each in answers.values() for one in each]
        self.load.record(self._unrecorded_s, drafted, waited_s=longest)
        self._unrecorded_s = 0.0
        self.num_rounds += len(answers)

    def _prepare(self, ahead: MergedAnticipation) -> None:
        """Prepare next proposals until a message arrives."""
        start = time.perf_counter()
        ahead.prepare(self._links.has_message)
        ended = time.perf_counter()
        self.busy_seconds["anticipate"] += ended - start
        for engine in self._numbers:
            self._idle_spans[engine] = (Span("anticipate", start, ended),)

    def _send_prepared(self, pooled: PooledDrafter) -> None:
        """Send engines what is prepared for them.

        An engine that has sent its next message meanwhile drops it.
        """
        for engine, number in list(self._numbers.items()):
            if prepared := pooled.prepared_proposals(engine):
                self._links.send(engine, PreparedProposals(number, prepared))
                del self._numbers[engine]


def _vocabulary(target: ModelInfo) -> tuple[object, ...]:
    return target.vocab_size, target.end_ids, target.decoder_start
