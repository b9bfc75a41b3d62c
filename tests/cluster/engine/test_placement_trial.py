"""The trial of both placements: what is timed, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import torch

from specserve.cluster.engine.placement_trial import try_placements, warm_drafter_up
from specserve.config.tree import config_from_keys
from specserve.drafters.after_verify import DraftAfterVerify
from specserve.models.warmup import warm_up
from tests.support import checkpoints
from tests.support.engines import Engine

KEYS: dict[str, object] = {"limits.max_running": 4}


def test_both_placements_are_timed_and_neither_pages_nor_threads_stay_taken(
    tmp_path: Path,
) -> None:
    target = checkpoints.make("llama", tmp_path / "target")
    engine, team = Engine(target, checkpoints.perturb(target, tmp_path / "draft", 0.1)), 2
    assert engine.drafter is not None
    drafter = DraftAfterVerify(engine.drafter, engine.target.runner.cache)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(team)
        warm_drafter_up(engine.target, drafter)
        curve = warm_up(engine.target)
        choice, chosen = try_placements(
            engine.target, drafter, curve, config_from_keys(KEYS), target_threads=1, draft_threads=1
        )
        assert torch.get_num_threads() == team
    finally:
        torch.set_num_threads(before)
    assert choice.loads == (1, 4)
    assert all(rate > 0 for rate in (*choice.together, *choice.apart))
    assert (chosen == curve) == (choice.placement == "together")
    engine.check_idle()
