"""`best_of`: more continuations than are sent, of which the likeliest are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specserve.api.schema import GenerationBody
from specserve.errors import BadValue
from specserve.sampling_params import MAX_N, Sampling


@dataclass(frozen=True, slots=True)
class BestOf:
    """The `n` of `count` continuations of each prompt that are sent, and what they show."""

    count: int
    n: int
    shows_logprobs: bool  # false: they are computed for the choice alone

    @classmethod
    def from_body(cls, body: GenerationBody) -> BestOf | None:
        """Return None if all continuations are sent."""
        count, n = body.best_of, body.n or 1
        if count is None or count == n:
            return None
        if not n < count <= MAX_N:
            raise BadValue(
                f"best_of must be a whole number from n, {n}, to {MAX_N}, not {str(count)[:30]}",
                param="best_of",
            )
        if body.stream:
            raise BadValue(
                "best_of above n cannot be streamed: the best are known at the end",
                param="best_of",
            )
        logprobs = getattr(body, "logprobs", None)
        return cls(count, n, shows_logprobs=logprobs is not None and logprobs is not False)

    def widen(self, sampling: Sampling) -> Sampling:
        """Return the sampling of all continuations, with the logprobs that rank them."""
        logprobs = sampling.logprobs if self.shows_logprobs else 0
        return replace(sampling, n=self.count, logprobs=logprobs)

    def choose(self, logprobs: Sequence[Sequence[float]]) -> list[int]:
        """Return the indices of the best continuations of each prompt, the best first.

        `logprobs` has each continuation's logprobs by token; the mean counts.
        """

        def mean(index: int) -> float:
            own = logprobs[index]
            return sum(own) / max(1, len(own))

        chosen: list[int] = []
        for start in range(0, len(logprobs), self.count):
            ranked = sorted(range(start, start + self.count), key=mean, reverse=True)
            chosen += ranked[: self.n]
        return chosen
