"""Slow passes are found against the device's own median of their size, and lasting ones timed."""

from __future__ import annotations

from specserve.engine.stragglers import (
    MIN_PASSES,
    NUM_RECENT,
    RELEARN_S,
    PassMedians,
    SlowPass,
)

USUAL_S = 0.02


def learnt(*, tokens: int = 6, cached: int = 300) -> PassMedians:
    times = PassMedians()
    for _ in range(MIN_PASSES):
        assert times.observe(tokens, cached, USUAL_S, now=0.0) is None
    return times


def test_a_pass_of_five_times_the_median_of_its_size_is_slow() -> None:
    times = learnt()
    assert times.observe(6, 300, 0.09, now=0.0) is None
    assert times.observe(6, 300, 0.11, now=0.0) == SlowPass(6, 0.11, USUAL_S)


def test_a_short_pass_is_slow_only_beyond_what_a_busy_host_costs() -> None:
    times = PassMedians()
    for _ in range(MIN_PASSES):
        times.observe(1, 10, 0.001, now=0.0)
    assert times.observe(1, 10, 0.03, now=0.0) is None, "30 times as long, though only 29 ms more"
    assert times.observe(1, 10, 0.06, now=0.0) is not None


def test_sizes_are_kept_apart_so_that_prompts_and_long_contexts_are_not_slow() -> None:
    times = learnt()
    assert times.observe(512, 300, 1.0, now=0.0) is None, "a prompt"
    assert times.observe(6, 100_000, 1.0, now=0.0) is None, "a long context"
    assert times.observe(6, 300, 1.0, now=0.0) is not None


def test_slow_passes_do_not_become_the_usual_ones() -> None:
    times = learnt()
    for _ in range(20 * NUM_RECENT):
        assert times.observe(6, 300, 10 * USUAL_S, now=0.0) == SlowPass(6, 0.2, USUAL_S)


def test_a_device_is_slow_for_as_long_as_most_of_its_recent_passes_are() -> None:
    times = learnt()
    for now in range(NUM_RECENT // 2):
        times.observe(6, 300, 1.0, now=float(now))
    assert times.slow_for(100.0) == 0.0, "only half of the recent passes"
    times.observe(6, 300, 1.0, now=100.0)
    assert times.slow_for(107.0) == 7.0
    for now in range(101, 101 + NUM_RECENT):
        times.observe(6, 300, USUAL_S, now=float(now))
    assert times.slow_for(200.0) == 0.0


def test_a_device_that_is_slow_teaches_no_new_sizes() -> None:
    times = learnt()
    for _ in range(NUM_RECENT):
        times.observe(6, 300, 1.0, now=0.0)
    for _ in range(MIN_PASSES):
        assert times.observe(6, 600, 1.0, now=1.0) is None, "contexts grow meanwhile"
    assert times.slow_for(10.0) == 10.0
    for now in range(10, 10 + NUM_RECENT):
        times.observe(6, 300, USUAL_S, now=float(now))
    for _ in range(MIN_PASSES):
        times.observe(6, 600, USUAL_S, now=100.0)
    assert times.observe(6, 600, 1.0, now=100.0) == SlowPass(6, 1.0, USUAL_S)


def test_a_single_slow_pass_now_and_then_is_no_slow_device() -> None:
    times = learnt()
    for now in range(10 * NUM_RECENT):
        times.observe(6, 300, USUAL_S if now % 3 else 1.0, now=float(now))
    assert times.slow_for(10_000.0) == 0.0


def test_times_that_have_changed_for_good_are_learnt_again() -> None:
    times = learnt()
    for turn in range(NUM_RECENT):
        times.observe(6, 300, 1.0, now=turn * RELEARN_S / 8)
    assert times.slow_for(1e9) == 0.0
    for _ in range(MIN_PASSES):
        times.observe(6, 300, 1.0, now=1e9)
    assert times.observe(6, 300, 1.0, now=1e9) is None
