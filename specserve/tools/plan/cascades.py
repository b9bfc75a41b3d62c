"""Walltime factor of cascades of drafters, and the best k. Plain numbers; knows no models.

`k[i][j]` is how many tokens reviewer i requests from stage j. Reviewer 0 is the target, reviewer i
the stage i - 1, and stages go from the largest to the smallest (arXiv 2312.11462, Algorithm 1), as
in the config's draft.k. A stage that has a row as reviewer proposes by reviews, which bring no more
tokens than are requested from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations_with_replacement, pairwise, product
from operator import mul

from specserve.theory import vertical_factor

Matrix = tuple[tuple[int, ...], ...]
FREE_ENTRIES: Mapping[str, Callable[[int], list[tuple[int, int]]]] = {
    "vertical": lambda size: [(i, i) for i in range(size)],
    "horizontal": lambda size: [(0, j) for j in range(size)],
    "cascade": lambda size: list(combinations_with_replacement(range(size), 2)),
}
"""Entries of k that may be above 0, by the number of stages."""


@dataclass(frozen=True, slots=True)
class CascadeStage:
    """Drafter of a cascade: alpha at the target and at each stage above it, and its cost.

    The cost is the time of a pass over that of the target.
    """

    alphas: tuple[float, ...]
    cost: float


@dataclass(frozen=True, slots=True)
class ReviewRound:
    """Round of one reviewer: the probability of 1, 2, ... tokens, and the expected cost."""

    tokens: tuple[float, ...]
    cost: float

    @property
    def factor(self) -> float:
        """Tokens per unit of time."""
        return sum(count * chance for count, chance in enumerate(self.tokens, start=1)) / self.cost


@dataclass(frozen=True, slots=True)
class CascadeChoice:
    """Best cascade of one kind, with its walltime factor; `k` is in the terms of that kind."""

    kind: str
    k: str
    factor: float


def cascade_factor(stages: Sequence[CascadeStage], k: Matrix) -> float:
    """Return the walltime factor if each token is accepted with its alpha, independently."""

    @cache
    def review(reviewer: int, limit: int) -> ReviewRound:
        """Review at most `limit` tokens of the stages below in one pass, and add one token."""
        cost = 1.0 if reviewer == 0 else stages[reviewer - 1].cost
        alphas: list[float] = []
        for stage in range(reviewer, len(stages)):
            length = min(k[reviewer][stage], limit - len(alphas))
            cost += proposing(stage, length)
            alphas += [stages[stage].alphas[reviewer]] * length
        reached = [*accumulate(alphas, mul, initial=1.0), 0.0]
        return ReviewRound(tuple(here - there for here, there in pairwise(reached)), cost)

    @cache
    def proposing(stage: int, length: int) -> float:
        """Return the expected cost of `length` tokens from a stage."""
        if stage + 1 >= len(k):
            return length * stages[stage].cost
        if length <= 0:
            return 0.0
        first = review(stage + 1, length - 1)
        return first.cost + sum(
            chance * proposing(stage, length - count)
            for count, chance in enumerate(first.tokens, start=1)
        )

    return review(0, sum(k[0])).factor


def best_cascades(stages: Sequence[CascadeStage], max_k: int) -> list[CascadeChoice]:
    """Return the best cascade of each kind that these stages allow, the fastest first."""
    choices = []
    for kind in FREE_ENTRIES:
        k = best_matrix(kind, stages, max_k)
        choices.append(
            CascadeChoice(kind, str([list(row) for row in k]), cascade_factor(stages, k))
        )
    if len(stages) == 2:
        choices.append(_best_review_count(stages, max_k))
    return sorted(choices, key=lambda choice: -choice.factor)


def best_matrix(kind: str, stages: Sequence[CascadeStage], max_k: int) -> Matrix:
    """Return the best k with at most `max_k` tokens a row.

    Every stage proposes for the reviewer right above it, as the config requires.
    """
    size = len(stages)
    entries = FREE_ENTRIES[kind](size)
    rows = 1 + max(i for i, _ in entries)
    lower = [int(i == j) for i, j in entries]

    def matrix(numbers: Sequence[int]) -> Matrix:
        filled = dict(zip(entries, numbers, strict=True))
        return tuple(tuple(filled.get((i, j), 0) for j in range(size)) for i in range(rows))

    def factor(numbers: Sequence[int]) -> float:
        k = matrix(numbers)
        return cascade_factor(stages, k) if max(map(sum, k)) <= max_k else 0.0

    starts = (lower, [4 * low for low in lower], [max_k * low for low in lower])
    return matrix(max((_hill_climb(start, lower, max_k, factor) for start in starts), key=factor))


def _best_review_count(stages: Sequence[CascadeStage], max_k: int) -> CascadeChoice:
    """Return the best vertical cascade of the paper's formula, with n reviews of any outcome."""
    first, second = stages

    def factor(numbers: Sequence[int]) -> float:
        n, k = numbers
        return vertical_factor(
            first.alphas[0], second.alphas[1], n=n, k=k, c1=first.cost, c2=second.cost
        )

    n, k = max(product(range(1, max_k + 1), repeat=2), key=factor)
    return CascadeChoice("vertical, by reviews", f"n = {n}, k = {k}", factor((n, k)))


def _hill_climb(
    start: Sequence[int],
    lower: Sequence[int],
    upper: int,
    factor: Callable[[Sequence[int]], float],
) -> list[int]:
    """Change any one number, or any two by a step, to the best neighbour until none is better."""
    best, found = list(start), factor(start)
    while True:
        tried = max(_neighbours(best, lower, upper), key=factor)
        if factor(tried) <= found * (1 + 1e-12):
            return best
        best, found = tried, factor(tried)


def _neighbours(numbers: Sequence[int], lower: Sequence[int], upper: int) -> Iterator[list[int]]:
    for i, low in enumerate(lower):
        yield from ([*numbers[:i], number, *numbers[i + 1 :]] for number in range(low, upper + 1))
    for steps in product((-1, 0, 1), repeat=len(numbers)):
        if sum(map(abs, steps)) == 2:
            moved = [number + step for number, step in zip(numbers, steps, strict=True)]
            if all(low <= number <= upper for low, number in zip(lower, moved, strict=True)):
                yield moved
