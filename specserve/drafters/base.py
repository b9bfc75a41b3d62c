"""What a drafter must be able to do for its next proposals to be prepared in advance. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specserve.types import DraftStep, Proposal


@dataclass(frozen=True, slots=True)
class Outlook:
    """Where a proposal may be stopped, and what may come next there. A draft token never follows its own refusal.

    Shares are the drafter's own opinion, between 0 and 1, as far as it has one: how sure it is of each draft, and of each token that may
    come next. How much that opinion is worth is for others to learn; `mode` tells opinions of different kinds apart.
    """

    seq_id: int
    start: int  # length of the prefix that the drafts continue
    drafts: tuple[int, ...]
    nexts: tuple[
        tuple[int, ...], ...
    ]  # [stop][rank], likeliest first; one stop for each number of accepted drafts, all of them included
    trust: tuple[float, ...] = ()  # [draft]
    shares: tuple[tuple[float, ...], ...] = ()  # [stop][rank]
    mode: str = ""

    @property
    def num_stops(self) -> int:
        return len(self.nexts)


class Guesser(Protocol):
    """Guesses, here and at once. What it has begun for the very same step it goes on with, so a proposal may be made in several calls."""

    def draft(self, steps: Sequence[DraftStep], enough: Callable[[], bool]) -> Sequence[Proposal]:
        """One proposal for each step, in their order. `enough` is asked between passes: True ends the drafting with what there is."""
        ...

    def release(self, seq_ids: Sequence[int]) -> None: ...


class Forks(Guesser, Protocol):
    """A guesser that can follow several continuations of one sequence."""

    def outlooks(self, seq_ids: Sequence[int], width: int) -> Sequence[Outlook]:
        """Of the last proposal of each; `width` tokens a stop at most. May take a pass: the place behind the last draft token is new."""
        ...

    def fork(self, seq_id: int, as_id: int, length: int) -> bool:
        """Another sequence with the same first `length` tokens. False, and nothing done, where there is no room for it."""
        ...

    def become(self, seq_id: int, branch_id: int) -> None:
        """The branch takes the sequence's place, with what has been drafted for it."""
        ...
