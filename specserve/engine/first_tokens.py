"""Record at which load first tokens come too late. Knows seconds and counts; no workers, no Ray.

The load of a first token is the number of requests that the engine had when it took the request.
"""

from __future__ import annotations

import math
import time
from collections import abc
from dataclasses import dataclass

from specserve.engine.estimates import CostEstimate
from specserve.types import Chunk, Curve, Request

HALF_LIFE_S = 600.0
"""Seconds after which a first token counts half."""
BUCKET_RATIO = 1.25
"""Largest load of a bucket, over that of the bucket below it."""
OWN_PROMPT_FACTOR = 2.0
"""Times the seconds of its own prompt that a first token may always take.

A long prompt on an idle engine says nothing about the load.
"""
MAX_LATE_SHARE = 0.05
"""Share of the first tokens that may come late."""
MIN_LATE = 2.5
"""Late first tokens without which a load is not too high: three that have faded a little."""
NUM_SIGMAS = 2.0
"""Standard deviations by which the share must exceed `MAX_LATE_SHARE`."""


@dataclass(slots=True)
class LoadBucket:
    """First tokens at loads that are nearly equal; their counts decay."""

    num_tokens: float = 0.0
    num_late: float = 0.0
    updated_at: float = 0.0

    def decay(self, now: float) -> None:
        """Bring the counts to the time `now`."""
        factor = 0.5 ** ((now - self.updated_at) / HALF_LIFE_S)
        self.num_tokens *= factor
        self.num_late *= factor
        self.updated_at = now

    @property
    def is_too_late(self) -> bool:
        """True if more first tokens are late than chance explains."""
        if self.num_late < MIN_LATE:
            return False
        sigma = math.sqrt(MAX_LATE_SHARE * (1 - MAX_LATE_SHARE) / self.num_tokens)
        return self.num_late / self.num_tokens > MAX_LATE_SHARE + NUM_SIGMAS * sigma


@dataclass(frozen=True, slots=True)
class _Wait:
    since: float
    seconds: float  # that its first token may take
    load: int


class FirstTokenRecord:
    """Waits for first tokens of one engine, by its load."""

    def __init__(
        self,
        target_s: float,
        curve: Curve,
        *,
        clock: abc.Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep the target; `curve` has the seconds of a pass by rows, () if not measured."""
        self._target_s, self._clock = target_s, clock
        self._costs = CostEstimate(curve) if curve else None
        self._waits: dict[int, _Wait] = {}
        self._buckets: dict[int, LoadBucket] = {}

    def begin(self, seq_id: int, request: Request, *, load: int) -> None:
        """Start to wait for the first token of a request; `load` includes it.

        A request that another engine has begun is left out.
        """
        if not request.generated:
            own = self._prompt_seconds(len(request.prompt))
            seconds = max(self._target_s, OWN_PROMPT_FACTOR * own)
            self._waits[seq_id] = _Wait(self._clock(), seconds, load)

    def observe(self, chunks: abc.Iterable[Chunk]) -> None:
        """Count the first tokens among these chunks."""
        now = self._clock()
        for chunk in chunks:
            if not chunk.tokens and chunk.finish is None:
                continue
            wait = self._waits.pop(chunk.seq_id, None)
            if wait is not None and chunk.tokens:
                bucket = self._buckets.setdefault(_bucket_of(wait.load), LoadBucket())
                bucket.decay(now)
                bucket.num_tokens += 1
                bucket.num_late += now - wait.since > wait.seconds

    def drop(self, seq_id: int) -> None:
        """Stop to wait for a sequence that gets no chunk."""
        self._waits.pop(seq_id, None)

    @property
    def limit(self) -> float | None:
        """The largest load, at least 1, below all at which first tokens are too late.

        None if they are too late at no load.
        """
        too_late = [number for number, bucket in self._recent() if bucket.is_too_late]
        return max(1.0, BUCKET_RATIO ** (min(too_late) - 1)) if too_late else None

    @property
    def highest_load(self) -> float:
        """The largest load of which enough first tokens are known; 0 if there is none."""
        known = [number for number, bucket in self._recent() if bucket.num_tokens >= MIN_LATE]
        return BUCKET_RATIO ** max(known) if known else 0.0

    def _recent(self) -> abc.Iterable[tuple[int, LoadBucket]]:
        now = self._clock()
        for bucket in self._buckets.values():
            bucket.decay(now)
        return self._buckets.items()

    def _prompt_seconds(self, num_tokens: int) -> float:
        return 0.0 if self._costs is None else float(self._costs.verify_seconds(num_tokens))


def _bucket_of(load: int) -> int:
    """Return the number of the bucket whose largest load is BUCKET_RATIO to its power."""
    return math.ceil(math.log(load, BUCKET_RATIO) - 1e-9)
