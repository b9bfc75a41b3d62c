"""How the kinds of cascades are composed of writers: by k, and by who reviews whom. Knows no config and no files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from specserve.drafters.cascade.stages import Alone, Relay, Reviewer, Stage, Tally, Turn, Writer
from specserve.drafters.neural.drafter import NeuralDrafter

Asked = Sequence[
    Sequence[int]
]  # k[i][j]: tokens asked of stage j by the target (i = 0) or by the stage before stage i


@dataclass(frozen=True, slots=True)
class Cast:
    """The stages from the largest to the smallest, and what a cascade is made of besides them."""

    stages: Sequence[Stage]
    asked: Asked
    lenience: Sequence[float]  # [stages - 1]
    tally: Tally


def writer_of(
    kind: str, stages: Sequence[Stage], *, asked: Asked, lenience: Sequence[float], tally: Tally
) -> Writer:
    """Of whatever stands first: of its tokens as many are written as are wanted."""
    num_pairs = len(stages) - 1
    cast = Cast(stages, asked, lenience if len(lenience) > 1 else [*lenience] * num_pairs, tally)
    return COMPOSITIONS[kind](cast)


def _horizontal(cast: Cast) -> Writer:
    alone = [Alone(number, stage, cast.tally) for number, stage in enumerate(cast.stages)]
    return _relay(alone, cast.asked[0], endless=True)


def _reviewing(cast: Cast) -> Writer:
    """2312.11462, Algorithm 1. Each stage but the last reviews what the smaller ones write in turn; so does the target, from row 0.

    A vertical cascade is one in which everybody asks the next smaller stage alone.
    """
    last = len(cast.stages) - 1
    writers: list[Writer] = [
        Alone(last, cast.stages[last], cast.tally)
    ]  # of stage `number` and those after it
    for number in range(last - 1, -1, -1):
        stage = cast.stages[number]
        assert isinstance(stage, NeuralDrafter), "what reviews has a model"
        below = _relay(writers, cast.asked[number + 1][number + 1 :])
        writers.insert(
            0, Reviewer(number, stage, below, cast.tally, lenience=cast.lenience[number])
        )
    return _relay(writers, cast.asked[0], endless=True)


COMPOSITIONS: Mapping[str, Callable[[Cast], Writer]] = {
    "horizontal": _horizontal,
    "vertical": _reviewing,
    "cascade": _reviewing,
}


def _relay(writers: Sequence[Writer], asked: Sequence[int], *, endless: bool = False) -> Relay:
    """Those that are asked for something; with `endless` the last of them goes on."""
    asking = [
        (writer, upto)
        for writer, count, upto in zip(writers, asked, accumulate(asked), strict=True)
        if count
    ]
    turns = [Turn(writer, upto) for writer, upto in asking]
    return Relay([*turns[:-1], Turn(turns[-1].writer, None)] if endless else turns)
