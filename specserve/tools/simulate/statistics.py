"""What is kept of a simulated run: a line for each request, sums over the rounds."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.engine.trace import Round


@dataclass(slots=True)
class Asked:
    """One request, as its client sees it."""

    at: float
    first: float | None = None  # when its first tokens came
    last: float | None = None
    num_first: int = 0  # that came together
    num_tokens: int = 0
    refused: bool = False
    failed: str | None = None

    def had(self, num_tokens: int, now: float) -> None:
        if not num_tokens:
            return
        if self.first is None:
            self.first, self.num_first = now, num_tokens
        self.last = now
        self.num_tokens += num_tokens

    @property
    def seconds_to_first(self) -> float | None:
        return None if self.first is None else self.first - self.at

    @property
    def seconds_per_token(self) -> float | None:
        """Mean of the tokens that came after the first ones."""
        if self.first is None or self.last is None or self.num_tokens <= self.num_first:
            return None
        return (self.last - self.first) / (self.num_tokens - self.num_first)


@dataclass(slots=True)
class Tally:
    """Sums over the rounds that only decode."""

    rounds: int = 0
    seconds: float = 0.0
    verify_seconds: float = 0.0
    sequences: int = 0
    committed: int = 0

    def take(self, done: Round) -> None:
        if not done.num_prompt_tokens:
            self.rounds += 1
            self.seconds += done.ended - done.begun
            self.verify_seconds += done.verified - done.drafted
            self.sequences += done.num_sequences
            self.committed += done.num_committed
