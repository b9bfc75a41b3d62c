"""Some of the target's layers beside the target, in its worker: they draft after each pass."""

from __future__ import annotations

from pathlib import Path

from tests.support import checkpoints
from tests.support.engines import greedy, library_greedy, load_target, model_options
from tests.support.local_worker import run_together
from tests.support.self_speculative_engines import layer_skip

PROMPTS = [[7, 11, 13], [5] * 40, list(range(3, 90)), [9, 8], list(range(100, 130))]
NUM_TOKENS = 48


def test_some_layers_draft_in_the_target_s_worker(tmp_path: Path) -> None:
    checkpoint = checkpoints.make("llama", tmp_path / "target")
    target = load_target(checkpoint, model_options())
    drafter = layer_skip(target)
    run = run_together(target, drafter, greedy(PROMPTS, max_tokens=NUM_TOKENS), gamma=3)
    assert run.texts == library_greedy(checkpoint, PROMPTS, max_tokens=NUM_TOKENS)
    assert run.drafted > 50
    assert target.runner.cache.num_used == 0
