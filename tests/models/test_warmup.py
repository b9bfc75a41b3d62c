"""Warm-up of a target: the seconds of a pass by its rows."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.models.warmup import WARMUP_ROWS, warm_up
from specserve.types import ModelInfo, Verdict, VerifyStep
from tests.support.clock import Clock


class FakeTarget:
    """A target whose passes take 1 ms, and 0.1 ms more for each row."""

    def __init__(self, *, context: int, slow: float = 1.0) -> None:
        self.info = ModelInfo(
            vocab_size=100,
            max_context=context,
            end_ids=frozenset(),
            page_size=16,
            num_pages=1000,
        )
        self.clock, self.slow = Clock(), slow
        self.held: set[int] = set()

    def verify(self, steps: Sequence[VerifyStep]) -> list[Verdict]:
        self.clock.now += self.slow * (
            1e-3 + 1e-4 * sum(len(step.tokens) + len(step.drafts) for step in steps)
        )
        self.held |= {step.seq_id for step in steps}
        return []

    def release(self, seq_ids: Sequence[int]) -> None:
        self.held -= set(seq_ids)


def test_warm_up_times_each_number_of_rows_and_releases_its_sequence() -> None:
    model = FakeTarget(context=4096)
    curve = dict(warm_up(model, clock=model.clock))
    assert tuple(curve) == tuple(sorted(WARMUP_ROWS))
    assert abs(curve[64] - 7.4e-3) < 1e-9
    assert not model.held


def test_warm_up_stops_early_for_a_short_context_or_a_slow_machine() -> None:
    short, slow = FakeTarget(context=20), FakeTarget(context=4096, slow=200.0)
    assert max(rows for rows, _ in warm_up(short, clock=short.clock)) == 16
    curve = warm_up(slow, clock=slow.clock)
    assert slow.clock.now < 5
    assert [rows for rows, _ in curve] == [1, 8, 32], "what shows its shape comes first"
    assert len(warm_up(slow, clock=slow.clock, timed=False)) == len(WARMUP_ROWS), (
        "ranks must all do the same, however slow"
    )
