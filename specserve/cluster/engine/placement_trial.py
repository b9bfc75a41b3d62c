"""Measure both placements of the draft in the target's process, and choose one.

The draft is there already, so both are tried with other numbers of threads: together the team of
both, apart each its own. That a draft apart takes memory bandwidth from the target is left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from specserve.config.tree import Config
from specserve.drafters.after_verify import DraftAfterVerify
from specserve.engine.draft_placement import (
    APART,
    PlacementChoice,
    PlacementCosts,
    choose_placement,
)
from specserve.models.target import TargetModel
from specserve.models.warmup import POLICY, WARMUP_SEQ_ID, warm_up
from specserve.types import Curve, VerifyStep

GAMMA = 4
"""Draft tokens of a measured proposal."""
REPEATS = 4
"""Times each pass runs; the quickest counts."""


def try_placements(
    target: TargetModel,
    drafter: DraftAfterVerify,
    curve: Curve,
    config: Config,
    *,
    target_threads: int,
    draft_threads: int,
) -> tuple[PlacementChoice, Curve]:
    """Return the placement that promises more, and the seconds of the target's passes there.

    The loads are one stream and the config's load. `curve` was measured with the threads that are
    set now, the threads of both together.
    """
    team = torch.get_num_threads()
    load = min(config.limits.max_running, round(config.replicas.target_ongoing_requests))
    loads = sorted({1, max(1, load)})
    together = PlacementCosts(curve, _draft_seconds(target, drafter, loads))
    try:
        torch.set_num_threads(target_threads)
        apart_curve = warm_up(target)
        torch.set_num_threads(draft_threads)
        apart = PlacementCosts(apart_curve, _draft_seconds(target, drafter, loads))
    finally:
        torch.set_num_threads(team)
    speculation = config.speculation
    choice = choose_placement(
        together, apart, loads=loads, max_gamma=speculation.gamma or speculation.max_gamma or 1
    )
    return choice, (apart if choice.placement == APART else together).target


def warm_drafter_up(target: TargetModel, drafter: DraftAfterVerify) -> None:
    """Run the drafter's first passes, which are much slower than later ones."""
    _draft_seconds(target, drafter, [1])


def _draft_seconds(target: TargetModel, drafter: DraftAfterVerify, counts: Sequence[int]) -> Curve:
    """Return the seconds of a draft token by the number of sequences."""
    return tuple((count, _seconds(target, drafter, count)) for count in counts)


def _seconds(target: TargetModel, drafter: DraftAfterVerify, count: int) -> float:
    """Measure a draft token for `count` sequences, after their first round."""
    encoder_input = () if target.info.decoder_start is None else (0,)
    fastest = float("inf")
    ids = [WARMUP_SEQ_ID + number for number in range(count)]
    for start in range(1 + REPEATS):
        steps = [
            VerifyStep(
                seq_id,
                start,
                (0,),
                (),
                None,
                POLICY,
                encoder_input=() if start else encoder_input,
                gamma=GAMMA,
            )
            for seq_id in ids
        ]
        verdicts = target.verify(steps)
        begun = time.perf_counter()
        drafter.draft_after(steps, verdicts)
        fastest = min(fastest, time.perf_counter() - begun)
    drafter.release(ids)
    target.release(ids)
    return fastest / GAMMA
