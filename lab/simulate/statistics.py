"""Statistics of a simulated run: times of each request, and sums over the rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specserve.engine.trace import Round


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of many durations, in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Quantiles | None:
        """Return the quantiles of the values, or None if there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(*(ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99)))


@dataclass(slots=True)
class RequestTimes:
    """Times of one request, as its client sees them."""

    sent: float
    first: float | None = None  # when the first tokens arrived
    last: float | None = None
    num_first: int = 0  # tokens that arrived together at `first`
    num_tokens: int = 0
    refused: bool = False
    failed: str | None = None

    def add_tokens(self, num_tokens: int, now: float) -> None:
        if not num_tokens:
            return
        if self.first is None:
            self.first, self.num_first = now, num_tokens
        self.last = now
        self.num_tokens += num_tokens

    @property
    def seconds_to_first(self) -> float | None:
        return None if self.first is None else self.first - self.sent

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time per token after the first ones."""
        if self.first is None or self.last is None or self.num_tokens <= self.num_first:
            return None
        return (self.last - self.first) / (self.num_tokens - self.num_first)


@dataclass(slots=True)
class RoundTotals:
    """Sums over the rounds that only decode."""

    rounds: int = 0
    seconds: float = 0.0
    verify_seconds: float = 0.0
    sequences: int = 0
    committed: int = 0

    def add(self, done: Round) -> None:
        if not done.num_prompt_tokens:
            self.rounds += 1
            self.seconds += done.end - done.start
            self.verify_seconds += done.verified_at - done.drafted_at
            self.sequences += done.num_sequences
            self.committed += done.num_committed
