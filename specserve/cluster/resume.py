"""One request over the life of several engines: what it has got so far, and how it is asked to go on. Knows neither Ray nor links."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

from specserve.errors import SpecserveError, WorkerLost
from specserve.types import Chunk, Request, Stats

# A request that no engine survives is given up after so many losses, and so long, without a new token. Bystanders get one sooner: they try again
# at other times than it does.
MAX_LOSSES, PATIENCE_S = 5, 120.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 3.0


class Story:
    """Tokens that the client has seen are `written` for the next engine, which goes on behind them: nothing is lost, and nothing comes twice."""

    def __init__(self, request: Request, clock: Callable[[], float] = time.monotonic) -> None:
        self._asked, self._clock = request, clock
        self._written = list(request.written)
        self._before: Stats | None = None  # of the engines that are gone
        self._now: Stats | None = None
        self._num_losses = 0  # without a token between them
        self._moved = clock()  # when the last token came
        self.num_resumed = 0

    @property
    def request(self) -> Request:
        """What to ask the next engine for."""
        return (
            replace(self._asked, written=tuple(self._written)) if self.num_resumed else self._asked
        )

    def take(self, chunk: Chunk) -> Chunk:
        """The chunk as the client is to see it."""
        if chunk.tokens:
            self._num_losses, self._moved = 0, self._clock()
            self._written += chunk.tokens
        if chunk.stats is None or not self.num_resumed:
            self._now = chunk.stats or self._now
            return chunk
        self._now = chunk.stats
        stats = chunk.stats if self._before is None else chunk.stats.after(self._before)
        return replace(chunk, stats=replace(stats, resumed=self.num_resumed))

    def lost(self, error: SpecserveError) -> float:
        """The engine is gone. Seconds to wait before another is asked, the first time none; raises when that has not helped for too long."""
        self._num_losses += 1
        if self._num_losses > MAX_LOSSES and self._clock() - self._moved > PATIENCE_S:
            raise WorkerLost(
                f"the request lost its engine {self._num_losses} times without getting any further: {error}"
            ) from error
        if self._now is not None:
            self._before = self._now if self._before is None else self._now.after(self._before)
        self._now = None
        self.num_resumed += 1
        return min(
            LONGEST_PAUSE_S, FIRST_PAUSE_S * (2.0 ** (self._num_losses - 1) - 1)
        ) * random.uniform(0.5, 1.5)
