"""Time a pass of the target with and without heads, in turns."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from specserve.config.tree import DEMO, config_from_keys
from specserve.features.eagle.heads import require_heads_for
from specserve.features.eagle.heads_drafter import HeadsDrafter
from specserve.models.target import TargetModel, open_target
from specserve.types import DraftStep, Policy, VerifyStep, Warp

GAMMA, LENGTH, PAGES = 4, 128, 512
POLICY = Policy(Warp(), "block", 1, LENGTH)


@dataclass(frozen=True, slots=True)
class HeadsOverhead:
    """Seconds of a pass, and of one followed by heads, by turn."""

    without_heads: tuple[float, ...]
    with_heads: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Ratios of the turns, sorted."""
        return sorted(
            slower / faster
            for faster, slower in zip(self.without_heads, self.with_heads, strict=True)
        )


class RoundTimer:
    """Times rounds of a target, with heads or without."""

    def __init__(self, checkpoint: Path, heads: Path | None) -> None:
        keys: dict[str, object] = {"target.path": str(checkpoint), "cache.pages": PAGES}
        config = config_from_keys(
            keys
            | (
                {"draft.kind": "none"}
                if heads is None
                else {"draft.kind": "heads", "draft.path": str(heads)}
            )
        )
        target = open_target(checkpoint, config)
        assert isinstance(target, TargetModel), "the only rank verifies"
        self._target, self._heads = (
            target,
            None if heads is None else HeadsDrafter.from_config(config, target),
        )

    def median_seconds(self, *, sequences: int, rounds: int) -> float:
        """Return the median time of a round.

        A round verifies one token of each sequence and, with heads, drafts after it.
        """
        self._target.verify(
            [VerifyStep(i, 0, (i + 1,) * LENGTH, (), None, POLICY) for i in range(sequences)]
        )
        seconds = []
        for start in range(LENGTH, LENGTH + rounds):
            started = time.perf_counter()
            self._run_round(start, sequences)
            seconds.append(time.perf_counter() - started)
        self._target.release(range(sequences))
        return median(seconds)

    def _run_round(self, start: int, sequences: int) -> None:
        verdicts = self._target.verify(
            [VerifyStep(i, start, (7,), (), None, POLICY) for i in range(sequences)]
        )
        if self._heads is not None:
            steps = [
                DraftStep(one.seq_id, start + 1, (one.next_token,), GAMMA, POLICY)
                for one in verdicts
            ]
            assert all(proposal.tokens for proposal in self._heads.propose(steps, math.inf)), (
                "the hidden rows of this pass are kept"
            )


def measure_overhead(
    checkpoint: Path, *, sequences: tuple[int, ...], turns: int, rounds: int
) -> dict[int, HeadsOverhead]:
    """Measure the demo target or a widened copy of it, which has the same heads.

    The results are by number of sequences.
    """
    require_heads_for(checkpoint, DEMO / "heads")
    without_heads = RoundTimer(checkpoint, None)
    with_heads = RoundTimer(checkpoint, DEMO / "heads")
    overheads = {}
    for num in sequences:
        pairs = [
            (
                without_heads.median_seconds(sequences=num, rounds=rounds),
                with_heads.median_seconds(sequences=num, rounds=rounds),
            )
            for _ in range(turns)
        ]
        overheads[num] = HeadsOverhead(
            tuple(one for one, _ in pairs), tuple(other for _, other in pairs)
        )
    return overheads
