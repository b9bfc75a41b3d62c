"""Warm a target up: compile kernels, fill allocators, and measure passes by their rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from specserve.errors import ModelError
from specserve.progress import ReportProgress, no_progress
from specserve.sampling.distribution import NOT_FINITE_ERROR
from specserve.types import Curve, ModelInfo, Policy, Verdict, VerifyStep, Warp

WARMUP_SEQ_ID = 2**62
"""Sequence id that no request ever has."""
WARMUP_ROWS = (1, 8, 32, 4, 16, 2, 64, 6, 12, 24, 48, 3, 128, 256)
"""Rows of the passes: those that show the shape of the curve come first, in case time runs out."""
REPEATS = 3
"""Times each pass runs; the quickest counts."""
NUM_TRIED = 4
"""Tokens of the vocabulary after which logits are looked at."""
ENOUGH_S = 0.2
"""Seconds of one pass's runs after which it is not repeated."""
MAX_TIMED_S = 2.0
"""Seconds after which no more passes are tried."""


class WarmupTarget(Protocol):
    """A target in this process, with a synchronous `verify`."""

    info: ModelInfo

    def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]: ...
    def release(self, seq_ids: Sequence[int]) -> None: ...


BRIEF_ROWS = (1, 8)
POLICY = Policy(Warp(temperature=0.0), "speculative", seed=0, prompt_length=1)


def require_finite(model: WarmupTarget) -> None:
    """Raise ModelError if no token of a few has finite logits after it.

    Every rank of a target must call it at the same time. A single broken row of an embedding is no
    reason: requests that use it fail alone.
    """
    info = model.info
    count = min(NUM_TRIED, info.num_pages // (1 + (info.decoder_start is not None)))
    policy = replace(POLICY, logprobs=0)  # which show it on each device
    steps = []
    for number in range(count):
        prompt = (number * info.vocab_size // count,)
        encoder_input = () if info.decoder_start is None else prompt
        seq_id = WARMUP_SEQ_ID + number
        steps.append(VerifyStep(seq_id, 0, prompt, (), None, policy, encoder_input=encoder_input))
    verdicts = model.verify(steps)
    model.release([step.seq_id for step in steps])
    if verdicts and not any(_is_finite(verdict) for verdict in verdicts):
        raise ModelError(NOT_FINITE_ERROR)


def _is_finite(verdict: Verdict) -> bool:
    return verdict.logprobs is not None and all(
        math.isfinite(one.token) for one in verdict.logprobs
    )


def warm_up(
    model: WarmupTarget,
    *,
    clock: Callable[[], float] = time.perf_counter,
    timed: bool = True,
    report_progress: ReportProgress = no_progress,
) -> Curve:
    """Return the seconds of a pass by its rows.

    Every rank of a target must warm up at the same time. Where there are several, no rank may stop
    early: `timed` False.
    """
    start, curve, room = clock(), [], _max_rows(model.info)
    for number, rows in enumerate(WARMUP_ROWS):
        report_progress("warming the target up", number / len(WARMUP_ROWS))
        if rows <= room and (not timed or clock() - start < MAX_TIMED_S):
            curve.append((rows, min(_repeated(model, rows, clock, timed=timed))))
    model.release([WARMUP_SEQ_ID])
    return tuple(sorted(curve))


def warm_up_briefly(model: WarmupTarget) -> None:
    """Run the passes without which the first round would be much slower than later ones."""
    for rows in BRIEF_ROWS:
        if rows <= _max_rows(model.info):
            _seconds(model, rows, time.perf_counter)
    model.release([WARMUP_SEQ_ID])


def _max_rows(info: ModelInfo) -> int:
    has_encoder = info.decoder_start is not None
    return min(info.max_context, (info.num_pages - has_encoder) * info.page_size)


def _repeated(
    model: WarmupTarget, rows: int, clock: Callable[[], float], *, timed: bool
) -> list[float]:
    """Measure one pass several times, a long one less often."""
    found: list[float] = []
    while len(found) < REPEATS + (rows == 1) and not (timed and sum(found) > ENOUGH_S):
        found.append(_seconds(model, rows, clock))
    return found


def _seconds(model: WarmupTarget, rows: int, clock: Callable[[], float]) -> float:
    """Measure one pass that verifies `rows` - 1 draft tokens.

    An encoder input is encoded in the first pass alone, which is never the quickest.
    """
    encoder_input = () if model.info.decoder_start is None else (0,)
    start = clock()
    drafts = (0,) * (rows - 1)
    step = VerifyStep(WARMUP_SEQ_ID, 0, (0,), drafts, None, POLICY, encoder_input=encoder_input)
    model.verify([replace(step, gamma=1)])  # no pass after it is enqueued before it is read
    return clock() - start
