"""What became of the draft tokens of many rounds, by their position in the proposal. Knows origins as clients see them, and no metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from specserve.types import Origin


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Only draft tokens that were judged count: what lies behind a refusal is never looked at."""

    plain: int = 0  # rounds without a proposal
    drafting: int = 0  # rounds with one
    reached: tuple[int, ...] = ()  # by position
    accepted: tuple[int, ...] = ()  # likewise, and as long

    @classmethod
    def of(cls, origins: Sequence[str]) -> Acceptance:
        """Of the tokens of one text, in their order. A round ends with the token that the target chose; the last may have been cut."""
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
    def sum(cls, parts: Iterable[Acceptance]) -> Acceptance:
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
        """The chance that a draft token is accepted, given that it is judged."""
        return sum(self.accepted) / sum(self.reached) if any(self.reached) else None

    @property
    def by_position(self) -> tuple[float, ...]:
        """The same at each position."""
        return tuple(
            accepted / reached
            for accepted, reached in zip(self.accepted, self.reached, strict=True)
        )

    @property
    def mean_accepted_length(self) -> float | None:
        """Accepted draft tokens a round, rounds without a proposal included."""
        return sum(self.accepted) / self.rounds if self.rounds else None


def _count(by_position: list[int], length: int) -> None:
    by_position += [0] * (length - len(by_position))
    for position in range(length):
        by_position[position] += 1


def _padded(counts: Sequence[int], length: int) -> tuple[int, ...]:
    return (*counts, *[0] * (length - len(counts)))
