"""The meters of the engine's benchmark find the passes of today's engine and change no text."""

from __future__ import annotations

from lab.bench.engine import time_demo_steps
from lab.bench.meters import attach_meter
from specserve import LLM, Sampling

PROMPT = (5, 6, 7, 8)


def test_the_meters_count_every_pass_and_every_verdict() -> None:
    keys: dict[str, object] = {"speculation.gamma": 3, "cache.pages": 64}
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(None, None, **keys) as llm:
        before = llm.generate([PROMPT], sampling)[0]
        meter = attach_meter(llm)
        after = llm.generate([PROMPT], sampling)[0]
    assert after.token_ids == before.token_ids
    assert after.stats is not None
    assert sum(drafted for drafted, _ in meter.verified) == after.stats.drafted
    assert sum(accepted for _, accepted in meter.verified) >= after.stats.accepted
    assert 0 < meter.alpha <= 1
    assert meter.target.median_seconds(4) > 0
    assert meter.draft.total > 0


def test_steps_of_the_demo_pair_are_timed_by_real_passes() -> None:
    steps = time_demo_steps(PROMPT, times=3)
    assert steps.draft > 0
    assert steps.target > 0
