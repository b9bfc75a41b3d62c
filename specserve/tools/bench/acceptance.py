"""Acceptance by position in the proposal, counted from the origins of tokens.

Knows origins as clients see them, and no metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from specserve.types import Origin


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Draft tokens that were verified, and those accepted.

    Tokens after a rejection are not verified, so they do not count.
    """

    plain: int = 0  # rounds without a proposal
    drafting: int = 0  # rounds with one
    reached: tuple[int, ...] = ()  # verified draft tokens, by position
    accepted: tuple[int, ...] = ()  # accepted ones, by position; as long as `reached`

    @classmethod
    def from_origins(cls, origins: Sequence[str]) -> AcceptanceCounts:
        """Count the tokens of one text, in their order.

        A round ends with the token that the target chose; the last round may have been cut.
        """
        plain, drafting, length = 0, 0, 0
        reached: list[int] = []
        accepted: list[int] = []
        for origin in (*origins, None):
            if origin == Origin.ACCEPTED:
                length += 1
            elif origin == Origin.PLAIN:
                plain += 1
            elif origin is not None or length:
                drafting += 1
                _count(reached, length + (origin == Origin.CORRECTION))
                _count(accepted, length)
                length = 0
        return cls(plain, drafting, tuple(reached), _padded(accepted, len(reached)))

    @classmethod
    def sum(cls, parts: Iterable[AcceptanceCounts]) -> AcceptanceCounts:
        """Add up the counts of several texts."""
        every = list(parts)
        return cls(
            sum(one.plain for one in every),
            sum(one.drafting for one in every),
            tuple(map(sum, zip_longest(*(one.reached for one in every), fillvalue=0))),
            tuple(map(sum, zip_longest(*(one.accepted for one in every), fillvalue=0))),
        )

    @property
    def rounds(self) -> int:
        return self.plain + self.drafting

    @property
    def alpha(self) -> float | None:
        """Probability that a draft token is accepted, given that it is verified."""
        return sum(self.accepted) / sum(self.reached) if any(self.reached) else None

    @property
    def by_position(self) -> tuple[float, ...]:
        """Alpha at each position of the proposal."""
        return tuple(
            accepted / reached
            for accepted, reached in zip(self.accepted, self.reached, strict=True)
        )

    @property
    def mean_accepted_length(self) -> float | None:
        """Accepted draft tokens per round, rounds without a proposal included."""
        return sum(self.accepted) / self.rounds if self.rounds else None


def _count(by_position: list[int], length: int) -> None:
    by_position += [0] * (length - len(by_position))
    for position in range(length):
        by_position[position] += 1


def _padded(counts: Sequence[int], length: int) -> tuple[int, ...]:
    return (*counts, *[0] * (length - len(counts)))
