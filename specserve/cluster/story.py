"""One request over the life of several engines: what it has got so far, and how it is asked to go on. Knows neither Ray nor links."""

from __future__ import annotations

from dataclasses import replace

from specserve.errors import SpecserveError, WorkerLost
from specserve.types import Chunk, Request, Stats

MAX_LOSSES = 5  # in a row without a single new token
FIRST_PAUSE_S = 0.05


class Story:
    """Tokens that the client has seen are `written` for the next engine, which goes on behind them: nothing is lost, and nothing comes twice."""

    def __init__(self, request: Request) -> None:
        self._asked = request
        self._written = list(request.written)
        self._before: Stats | None = None  # of the engines that are gone
        self._now: Stats | None = None
        self._num_losses = 0  # without a token between them
        self.num_resumed = 0

    @property
    def request(self) -> Request:
        """What to ask the next engine for."""
        return replace(self._asked, written=tuple(self._written)) if self.num_resumed else self._asked

    def take(self, chunk: Chunk) -> Chunk:
        """The chunk as the client is to see it."""
        if chunk.tokens:
            self._num_losses = 0
            self._written += chunk.tokens
        if chunk.stats is None or not self.num_resumed:
            self._now = chunk.stats or self._now
            return chunk
        self._now = chunk.stats
        stats = chunk.stats if self._before is None else chunk.stats.after(self._before)
        return replace(chunk, stats=replace(stats, resumed=self.num_resumed))

    def lost(self, error: SpecserveError) -> float:
        """The engine is gone. Seconds to wait before another is asked; raises when that has not helped for too long."""
        self._num_losses += 1
        if self._num_losses > MAX_LOSSES:
            raise WorkerLost(f"the request lost its engine {MAX_LOSSES} times without getting any further: {error}") from error
        if self._now is not None:
            self._before = self._now if self._before is None else self._now.after(self._before)
        self._now = None
        self.num_resumed += 1
        return FIRST_PAUSE_S * float(2**self._num_losses - 2)
