"""The first passes of a target: they make kernels and allocators ready, and say what a pass costs by the rows in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from specserve.progress import Tell, silent
from specserve.types import ModelInfo, Policy, Verdict, VerifyStep, Warp

SEQUENCE = 2**62  # no request ever has this id
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
TIMES, ENOUGH_S = (
    3,
    2.0,
)  # of each pass, the quickest counts; past so many seconds the longer ones are not tried


class Verifies(Protocol):
    info: ModelInfo

    def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]: ...
    def release(self, seq_ids: Sequence[int]) -> None: ...


POLICY = Policy(Warp(temperature=0.0), "speculative", seed=0, prompt_length=1)


def warm_up(
    model: Verifies,
    *,
    clock: Callable[[], float] = time.perf_counter,
    timed: bool = True,
    tell: Tell = silent,
) -> tuple[tuple[int, float], ...]:
    """Seconds by rows. Every rank of a target must do it at the same time; where there are several, no rank may stop early: `timed` False."""
    begun, curve = clock(), []
    encodes = model.info.decoder_start is not None
    room = min(model.info.max_context, (model.info.num_pages - encodes) * model.info.page_size)
    for number, rows in enumerate(ROWS):
        tell("warming the target up", number / len(ROWS))
        if rows <= room and (not timed or clock() - begun < ENOUGH_S):
            curve.append(
                (rows, min(_seconds(model, rows, clock) for _ in range(TIMES + (rows == 1))))
            )
    model.release([SEQUENCE])
    return tuple(curve)


def _seconds(model: Verifies, rows: int, clock: Callable[[], float]) -> float:
    """Of one pass that judges rows - 1 drafts. A source is read in the first alone, which is never the quickest."""
    source = () if model.info.decoder_start is None else (0,)
    begun = clock()
    model.verify([VerifyStep(SEQUENCE, 0, (0,), (0,) * (rows - 1), None, POLICY, source=source)])
    return clock() - begun
