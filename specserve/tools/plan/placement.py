"""Time the passes of both placements of the draft on a CPU's threads, and choose one.

Together both models have all threads in turns; apart the draft has one, the target the others. That
a draft apart takes memory bandwidth from the target is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from specserve.engine.draft_placement import PlacementChoice, PlacementCosts, choose_placement
from specserve.progress import ReportProgress, no_progress
from specserve.tools.plan.measure import ModelReader, seconds
from specserve.types import Curve

LOADS = (1, 8)
"""Streams, and so sequences of a draft pass."""
TARGET_ROWS = (1, 4, 8, 32)
"""Rows of a target pass, all of one sequence, as in the warm-up of a server."""
TIMES = 5
"""Timed passes of each shape and number of threads."""

Passes = Mapping[int, Callable[[], float]]  # by rows or sequences


def measure_placement(
    target: ModelReader,
    draft: ModelReader,
    *,
    alpha: float,
    max_gamma: int,
    report_progress: ReportProgress = no_progress,
) -> PlacementChoice | None:
    """Return the better placement, or None without two threads to divide.

    The number of threads is the same afterwards.
    """
    threads = torch.get_num_threads()
    if target.runner.device.type != "cpu" or threads < 2:
        return None
    target_passes = {rows: target.pass_seconds(rows) for rows in TARGET_ROWS}
    draft_passes = {count: draft.pass_seconds(1, sequences=count) for count in LOADS}

    def curve(passes: Passes, num_threads: int) -> Curve:
        torch.set_num_threads(num_threads)
        return _curve(passes, report_progress)

    try:
        return choose_placement(
            PlacementCosts(curve(target_passes, threads), curve(draft_passes, threads)),
            PlacementCosts(curve(target_passes, threads - 1), curve(draft_passes, 1)),
            loads=LOADS,
            max_gamma=max_gamma,
            alpha=alpha,
        )
    finally:
        torch.set_num_threads(threads)


def _curve(passes: Passes, report_progress: ReportProgress) -> Curve:
    named = {str(count): timed for count, timed in passes.items()}
    taken = seconds(named, times=TIMES, report_progress=report_progress)
    return tuple((count, taken[str(count)]) for count in passes)
