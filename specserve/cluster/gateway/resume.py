"""Resume a request on another engine after its engine was lost. Knows neither Ray nor links."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

from specserve.errors import SpecserveError, WorkerLost
from specserve.types import Chunk, Request, Stats

# A request that crashes every engine fails once it has had more than this many losses and this long
# without a new token. Innocent requests get a token sooner: the backoff is random, so they are
# retried at other times than the one that crashes.
MAX_LOSSES = 5
MAX_STALL_S = 120.0
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 3.0


class ResumableRequest:
    """Request with the tokens generated so far, which the next engine continues.

    The client thus loses no token and receives none twice.
    """

    def __init__(self, request: Request, clock: Callable[[], float] = time.monotonic) -> None:
        self._original, self._clock = request, clock
        self._generated = list(request.generated)
        self._lost_stats: Stats | None = None  # of the engines that are gone
        self._current_stats: Stats | None = None
        self._prompt_stop = 1  # position up to which logprobs of the prompt have come
        self._num_losses = 0  # since the last token
        self._last_progress = clock()  # time of the last token
        self.num_resumed = 0

    @property
    def request(self) -> Request:
        """Request to send to the next engine."""
        if not self.num_resumed:
            return self._original
        return replace(self._original, generated=tuple(self._generated))

    def record_chunk(self, chunk: Chunk) -> Chunk | None:
        """Record the chunk's tokens, and return it with the statistics of all engines together.

        Returns None for a repeat. Raises WorkerLost if tokens before the chunk have not come: the
        next engine generates them again.
        """
        length = len(self._generated)
        if chunk.start < length and chunk.start + len(chunk.tokens) <= length and not chunk.finish:
            return None
        if chunk.start != length:
            raise WorkerLost(
                f"a chunk was lost between engine and gateway: the next one starts at token "
                f"{chunk.start}, after {length} tokens"
            )
        if chunk.prompt_logprobs is not None:
            if chunk.prompt_logprobs.start > self._prompt_stop:
                raise WorkerLost("logprobs of the prompt were lost between engine and gateway")
            self._prompt_stop = chunk.prompt_logprobs.stop
        if chunk.tokens:
            self._num_losses, self._last_progress = 0, self._clock()
            self._generated += chunk.tokens
        if chunk.stats is None or not self.num_resumed:
            self._current_stats = chunk.stats or self._current_stats
            return chunk
        self._current_stats = chunk.stats
        stats = chunk.stats if self._lost_stats is None else chunk.stats.after(self._lost_stats)
        return replace(chunk, stats=replace(stats, resumed=self.num_resumed))

    def on_engine_lost(self, error: SpecserveError) -> float:
        """Return the seconds to wait before the next engine is called: none at the first loss.

        Raises WorkerLost after more than MAX_LOSSES without a token in MAX_STALL_S.
        """
        self._num_losses += 1
        if self._num_losses > MAX_LOSSES and self._clock() - self._last_progress > MAX_STALL_S:
            raise WorkerLost(
                f"the request lost its engine {self._num_losses} times "
                f"without getting any further: {error}"
            ) from error
        if self._current_stats is not None:
            self._lost_stats = (
                self._current_stats
                if self._lost_stats is None
                else self._current_stats.after(self._lost_stats)
            )
        self._current_stats = None
        self.num_resumed += 1
        backoff = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * (2.0 ** (self._num_losses - 1) - 1))
        return backoff * random.uniform(0.5, 1.5)
