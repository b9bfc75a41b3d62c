"""Figures of speculation and of time for one request, as its answer reports them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest


def sum_positions(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sums of counts at the same position; some have more positions than others."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of speculation for one request; the fields of the response's `specserve` object."""

    verifier: str
    lossless: bool
    rounds: int  # rounds that committed at least one token
    drafted: int
    accepted: int
    target_passes: int  # rounds and prompt chunks
    anticipated: int = 0
    resumed: int = 0
    irreproducible: str | None = None  # as in ModelInfo
    drafts: int = 0  # rounds that verified draft tokens
    accepted_by_position: tuple[int, ...] = ()  # drafts whose first, second, ... token was accepted
    # Of the engine that began the request: what its prefix cache had of the prompt, and the times
    # until the first pass, and from there to the first token.
    cached_tokens: int = 0
    queue_time_ms: float = field(default=0.0, compare=False)
    prefill_time_ms: float = field(default=0.0, compare=False)

    def after(self, earlier: Stats) -> Stats:
        """Return the sum with the counts of an earlier engine that began the request."""
        return replace(
            self,
            rounds=earlier.rounds + self.rounds,
            drafted=earlier.drafted + self.drafted,
            accepted=earlier.accepted + self.accepted,
            target_passes=earlier.target_passes + self.target_passes,
            anticipated=earlier.anticipated + self.anticipated,
            irreproducible=self.irreproducible or earlier.irreproducible,
            drafts=earlier.drafts + self.drafts,
            accepted_by_position=sum_positions(
                (earlier.accepted_by_position, self.accepted_by_position)
            ),
            cached_tokens=earlier.cached_tokens,
            queue_time_ms=earlier.queue_time_ms,
            prefill_time_ms=earlier.prefill_time_ms,
        )

    @property
    def reproducible(self) -> bool:
        """True if the text's bits do not depend on what else was served."""
        return self.irreproducible is None

    @property
    def mean_accepted_length(self) -> float:
        """Accepted draft tokens a round."""
        return self.accepted / self.rounds if self.rounds else 0.0
