"""Build the tree of stages of each kind of cascade. Knows no config and no files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.features.cascade.stages import (
    HorizontalStages,
    LeafStage,
    PassCounter,
    ReviewStage,
    StageDrafter,
    StageNode,
    StageQuota,
)

DEFAULT_STAGE_TOKENS = 4
"""Tokens requested from each stage where draft.k is left out."""


@dataclass(frozen=True, slots=True)
class CascadeSpec:
    """The drafters of a cascade from the largest to the smallest, and their parameters."""

    stages: Sequence[StageDrafter]
    k: Sequence[Sequence[int]]
    """k[i][j]: tokens that the target (i = 0) or the stage before stage i asks of stage j."""
    lenience: Sequence[float]
    """[stages - 1]"""
    counter: PassCounter


def stage_token_matrix(
    kind: str, num_stages: int, k: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Return draft.k, or its default for this kind where it is left out.

    k[i][j] is the number of tokens that the target (i = 0) or the stage before stage i asks of
    stage j, as in 2312.11462, Algorithm 1.
    """
    if k:
        return tuple(tuple(row) for row in k)
    rows = 1 if kind == "horizontal" else num_stages
    return tuple(
        tuple(
            DEFAULT_STAGE_TOKENS if j == i or (j > i and kind != "vertical") else 0
            for j in range(num_stages)
        )
        for i in range(rows)
    )


def build_stages(
    kind: str,
    stages: Sequence[StageDrafter],
    *,
    k: Sequence[Sequence[int]],
    lenience: Sequence[float],
    counter: PassCounter,
) -> StageNode:
    """Build the stage tree for `kind`.

    The last node in turn has no quota: it writes as many tokens as the proposal needs.
    """
    num_pairs = len(stages) - 1
    leniences = lenience if len(lenience) > 1 else [*lenience] * num_pairs
    return BUILDERS[kind](CascadeSpec(stages, k, leniences, counter))


def _build_horizontal(spec: CascadeSpec) -> StageNode:
    leaves = [LeafStage(number, stage, spec.counter) for number, stage in enumerate(spec.stages)]
    return _in_turn(leaves, spec.k[0], unlimited=True)


def _build_reviewing(spec: CascadeSpec) -> StageNode:
    """Build Algorithm 1 of 2312.11462.

    Each stage but the last reviews what the smaller ones draft in turn. So does the target, by row
    0 of k. A vertical cascade is one in which each stage asks the next smaller one alone.
    """
    last = len(spec.stages) - 1
    nodes: list[StageNode] = [LeafStage(last, spec.stages[last], spec.counter)]
    for number in range(last - 1, -1, -1):
        stage = spec.stages[number]
        assert isinstance(stage, NeuralDrafter), "a stage that reviews has a model"
        below = _in_turn(nodes, spec.k[number + 1][number + 1 :])
        nodes.insert(
            0, ReviewStage(number, stage, below, spec.counter, lenience=spec.lenience[number])
        )
    return _in_turn(nodes, spec.k[0], unlimited=True)


BUILDERS: Mapping[str, Callable[[CascadeSpec], StageNode]] = {
    "horizontal": _build_horizontal,
    "vertical": _build_reviewing,
    "cascade": _build_reviewing,
}


def _in_turn(
    nodes: Sequence[StageNode], k: Sequence[int], *, unlimited: bool = False
) -> HorizontalStages:
    """Return the nodes that must give tokens; with `unlimited` the last one has no quota."""
    asked = [
        (node, max_tokens)
        for node, count, max_tokens in zip(nodes, k, accumulate(k), strict=True)
        if count
    ]
    quotas = [StageQuota(node, max_tokens) for node, max_tokens in asked]
    return HorizontalStages([*quotas[:-1], StageQuota(asked[-1][0], None)] if unlimited else quotas)
