"""Records that an engine keeps of its rounds and requests: the journal, spans and first tokens.

Knows neither workers nor Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from specserve.engine.first_tokens import FirstTokenRecord
from specserve.engine.trace import Exchange, Round, TraceJournal
from specserve.metrics import Registry
from specserve.tracing import EngineSpans, tracer_from_environment
from specserve.types import Chunk, Request


class RequestObserver(Protocol):
    """A record of requests, from their submission to their last chunk."""

    def begin(self, seq_id: int, request: Request, *, load: int) -> None:
        """Take a new request, which is one of `load` that the engine has now."""
        ...

    def observe(self, chunks: Sequence[Chunk]) -> None: ...

    def drop(self, seq_id: int) -> None:
        """Leave out a sequence that gets no chunk."""
        ...


class EngineRecords:
    """The journal of an engine, and the observers of its requests.

    `replica` and `started`, the sequences that had a pass of the target, are for spans, which the
    environment turns on.
    """

    def __init__(
        self, registry: Registry, *, replica: str, started: Callable[[], Collection[int]]
    ) -> None:
        self.journal = TraceJournal(registry)
        tracer = tracer_from_environment()
        self._spans = (
            None if tracer is None else EngineSpans(tracer, replica=replica, started=started)
        )
        self.first_tokens: FirstTokenRecord | None = None  # if a target for them is set
        self._observers: list[RequestObserver] = [] if self._spans is None else [self._spans]

    def add_first_tokens(self, first_tokens: FirstTokenRecord) -> None:
        """Record the first tokens of requests, too."""
        self.first_tokens = first_tokens
        self._observers.insert(0, first_tokens)

    def record_exchange(self, exchange: Exchange) -> None:
        self.journal.record_exchange(exchange)
        if self._spans is not None:
            seconds_ago = time.perf_counter() - exchange.answered_at
            self._spans.record_exchange(exchange.role, exchange.busy_seconds, seconds_ago)

    def record_round(self, done: Round) -> None:
        self.journal.record_round(done)
        if self._spans is not None:
            self._spans.record_round(time.perf_counter() - done.start)

    def begin(self, seq_id: int, request: Request, *, load: int) -> None:
        """Record a new request, which is one of `load` that the engine has now."""
        for observer in self._observers:
            observer.begin(seq_id, request, load=load)

    def observe(self, chunks: Sequence[Chunk]) -> None:
        for observer in self._observers:
            observer.observe(chunks)

    def drop(self, seq_id: int) -> None:
        """Leave out a sequence that gets no chunk."""
        for observer in self._observers:
            observer.drop(seq_id)
