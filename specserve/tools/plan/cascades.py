"""Cascades of drafters by theory: what a choice of k comes to, and the best one. Plain numbers; knows no models.

`k[i][j]` is how many tokens reviewer i has from stage j; reviewer 0 is the target, reviewer i the stage i - 1, and stages go from the
largest to the smallest (2312.11462, Algorithm 1), as in the config's draft.k. A stage that has a row as a reviewer writes by reviews, which
bring no more tokens than are wanted of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations_with_replacement, pairwise, product
from operator import mul

from specserve.theory import vertical_factor

Matrix = tuple[tuple[int, ...], ...]
PLACES: Mapping[
    str, Callable[[int], list[tuple[int, int]]]
] = {  # where k may have tokens, by the number of stages
    "vertical": lambda size: [(i, i) for i in range(size)],
    "horizontal": lambda size: [(0, j) for j in range(size)],
    "cascade": lambda size: list(combinations_with_replacement(range(size), 2)),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """A drafter of a cascade."""

    alphas: tuple[float, ...]  # how often the target accepts its tokens, then each stage above it
    cost: float  # seconds of a pass / of the target's


@dataclass(frozen=True, slots=True)
class Round:
    """Of one reviewer."""

    tokens: tuple[float, ...]  # the chance of 1, 2, ... tokens
    cost: float  # of all passes that it is expected to take

    @property
    def factor(self) -> float:
        """Tokens a unit of time."""
        return sum(count * chance for count, chance in enumerate(self.tokens, start=1)) / self.cost


@dataclass(frozen=True, slots=True)
class Choice:
    """The best of one kind of cascade, as a walltime factor."""

    kind: str
    k: str  # in the terms of that kind
    factor: float


def cascade_factor(stages: Sequence[Stage], k: Matrix) -> float:
    """Times faster than plain decoding, where every token is accepted with its alpha whatever came before it."""

    @cache
    def review(reviewer: int, most: int) -> Round:
        """One pass over what the stages below write one behind the other, at most so many: what is accepted, and one of its own."""
        cost = 1.0 if reviewer == 0 else stages[reviewer - 1].cost
        alphas: list[float] = []
        for stage in range(reviewer, len(stages)):
            length = min(k[reviewer][stage], most - len(alphas))
            cost += writing(stage, length)
            alphas += [stages[stage].alphas[reviewer]] * length
        reached = [*accumulate(alphas, mul, initial=1.0), 0.0]
        return Round(tuple(here - there for here, there in pairwise(reached)), cost)

    @cache
    def writing(stage: int, length: int) -> float:
        """What so many tokens of a stage are expected to cost."""
        if stage + 1 >= len(k):
            return length * stages[stage].cost
        if length <= 0:
            return 0.0
        one = review(stage + 1, length - 1)
        return one.cost + sum(
            chance * writing(stage, length - count)
            for count, chance in enumerate(one.tokens, start=1)
        )

    return review(0, sum(k[0])).factor


def best_choices(stages: Sequence[Stage], max_k: int) -> list[Choice]:
    """Of each kind that these stages can make, the best first."""
    choices = []
    for kind in PLACES:
        k = best_matrix(kind, stages, max_k)
        choices.append(Choice(kind, str([list(row) for row in k]), cascade_factor(stages, k)))
    if len(stages) == 2:
        choices.append(_best_reviews(stages, max_k))
    return sorted(choices, key=lambda choice: -choice.factor)


def best_matrix(kind: str, stages: Sequence[Stage], max_k: int) -> Matrix:
    """With at most `max_k` tokens a row. Every stage writes something for the reviewer right above it, as the config wants it."""
    size = len(stages)
    places = PLACES[kind](size)
    rows = 1 + max(i for i, _ in places)
    least = [int(i == j) for i, j in places]

    def matrix(numbers: Sequence[int]) -> Matrix:
        filled = dict(zip(places, numbers, strict=True))
        return tuple(tuple(filled.get((i, j), 0) for j in range(size)) for i in range(rows))

    def factor(numbers: Sequence[int]) -> float:
        k = matrix(numbers)
        return cascade_factor(stages, k) if max(map(sum, k)) <= max_k else 0.0

    starts = (least, [4 * low for low in least], [max_k * low for low in least])
    return matrix(max((_climbed(start, least, max_k, factor) for start in starts), key=factor))


def _best_reviews(stages: Sequence[Stage], max_k: int) -> Choice:
    """A vertical cascade as the paper's formula has it: always n reviews, however many tokens they bring."""
    first, second = stages

    def factor(numbers: Sequence[int]) -> float:
        n, k = numbers
        return vertical_factor(
            first.alphas[0], second.alphas[1], n=n, k=k, c1=first.cost, c2=second.cost
        )

    n, k = max(product(range(1, max_k + 1), repeat=2), key=factor)
    return Choice("vertical, by reviews", f"n = {n}, k = {k}", factor((n, k)))


def _climbed(
    start: Sequence[int], least: Sequence[int], most: int, factor: Callable[[Sequence[int]], float]
) -> list[int]:
    """Any number anew, or any two by a step, whichever is best, until nothing is better."""
    best, found = list(start), factor(start)
    while True:
        tried = max(_neighbours(best, least, most), key=factor)
        if factor(tried) <= found * (1 + 1e-12):
            return best
        best, found = tried, factor(tried)


def _neighbours(numbers: Sequence[int], least: Sequence[int], most: int) -> Iterator[list[int]]:
    for place, low in enumerate(least):
        yield from (
            [*numbers[:place], number, *numbers[place + 1 :]] for number in range(low, most + 1)
        )
    for steps in product((-1, 0, 1), repeat=len(numbers)):
        if sum(map(abs, steps)) == 2:
            moved = [number + step for number, step in zip(numbers, steps, strict=True)]
            if all(low <= number <= most for low, number in zip(least, moved, strict=True)):
                yield moved
