"""What heads add to a pass of the target: the same pass with and without them, in turns."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from specserve.config.tree import DEMO, parse
from specserve.drafters.heads import HeadsDrafter
from specserve.models.heads import require_heads_of
from specserve.models.rank import open_rank
from specserve.models.target import TargetModel
from specserve.types import DraftStep, Policy, VerifyStep, Warp

GAMMA, LENGTH, PAGES = 4, 128, 512
POLICY = Policy(Warp(), "block", 1, LENGTH)


@dataclass(frozen=True, slots=True)
class Added:
    """Seconds of a pass, and of the same with heads behind it, turn by turn."""

    alone: tuple[float, ...]
    telling: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """In order of size."""
        return sorted(
            telling / alone for alone, telling in zip(self.alone, self.telling, strict=True)
        )


class Passes:
    """A target that judges, with heads or without."""

    def __init__(self, checkpoint: Path, heads: Path | None) -> None:
        keys: dict[str, object] = {"target.path": str(checkpoint), "cache.pages": PAGES}
        config = parse(
            keys
            | (
                {"draft.kind": "none"}
                if heads is None
                else {"draft.kind": "heads", "draft.path": str(heads)}
            )
        )
        target = open_rank(checkpoint, config)
        assert isinstance(target, TargetModel), "the only rank judges"
        self._target, self._heads = (
            target,
            None if heads is None else HeadsDrafter.of(config, target),
        )

    def seconds(self, *, sequences: int, number: int) -> float:
        """The median of so many rounds that judge one token of each sequence, and draft behind it if there are heads."""
        self._target.verify(
            [VerifyStep(i, 0, (i + 1,) * LENGTH, (), None, POLICY) for i in range(sequences)]
        )
        taken = []
        for start in range(LENGTH, LENGTH + number):
            begun = time.perf_counter()
            self._round(start, sequences)
            taken.append(time.perf_counter() - begun)
        self._target.release(range(sequences))
        return median(taken)

    def _round(self, start: int, sequences: int) -> None:
        verdicts = self._target.verify(
            [VerifyStep(i, start, (7,), (), None, POLICY) for i in range(sequences)]
        )
        if self._heads is not None:
            asked = [
                DraftStep(one.seq_id, start + 1, (one.next_token,), GAMMA, POLICY)
                for one in verdicts
            ]
            assert all(proposal.tokens for proposal in self._heads.propose(asked, math.inf)), (
                "the rows of this pass are kept"
            )


def added(
    checkpoint: Path, *, sequences: tuple[int, ...], turns: int, number: int
) -> dict[int, Added]:
    """By number of sequences, for the demo target or a widened copy of it, whose heads are the same."""
    require_heads_of(checkpoint, DEMO / "heads")
    alone, telling = Passes(checkpoint, None), Passes(checkpoint, DEMO / "heads")
    found = {}
    for num in sequences:
        pairs = [
            (
                alone.seconds(sequences=num, number=number),
                telling.seconds(sequences=num, number=number),
            )
            for _ in range(turns)
        ]
        found[num] = Added(tuple(one for one, _ in pairs), tuple(other for _, other in pairs))
    return found
