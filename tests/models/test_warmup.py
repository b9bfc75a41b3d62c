"""Warm-up of a target: the seconds of a pass by its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specserve.errors import ModelError
from specserve.models.warmup import NUM_TRIED, WARMUP_ROWS, require_finite, warm_up
from specserve.types import Logprobs, ModelInfo, Verdict, VerifyStep
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


@pytest.mark.parametrize("timed", [True, False])
def test_long_passes_are_repeated_less_often(*, timed: bool) -> None:
    model, rows = FakeTarget(context=4096, slow=12.0), list[int]()
    verify = model.verify

    def counted(steps: Sequence[VerifyStep]) -> list[Verdict]:
        rows.append(sum(len(step.tokens) + len(step.drafts) for step in steps))
        return verify(steps)

    model.verify = counted  # type: ignore[method-assign]
    warm_up(model, clock=model.clock, timed=timed)
    assert [rows.count(one) for one in (1, 64, 256)] == ([4, 3, 1] if timed else [4, 3, 3])


def test_warm_up_stops_early_for_a_short_context_or_a_slow_machine() -> None:
    short, slow = FakeTarget(context=20), FakeTarget(context=4096, slow=200.0)
    assert max(rows for rows, _ in warm_up(short, clock=short.clock)) == 16
    curve = warm_up(slow, clock=slow.clock)
    assert slow.clock.now < 5
    assert [rows for rows, _ in curve] == [1, 4, 8, 16, 32], "what shows its shape comes first"
    assert len(warm_up(slow, clock=slow.clock, timed=False)) == len(WARMUP_ROWS), (
        "ranks must all do the same, however slow"
    )


class ScoredTarget(FakeTarget):
    """A target of known logprobs, one after each step."""

    def __init__(self, logprobs: Sequence[float], *, num_pages: int = 1000) -> None:
        super().__init__(context=64)
        self.info = replace(self.info, num_pages=num_pages)
        self.logprobs, self.tokens = logprobs, list[int]()

    def verify(self, steps: Sequence[VerifyStep]) -> list[Verdict]:
        super().verify(steps)
        self.tokens += [step.tokens[0] for step in steps]
        return [
            Verdict.failed(step.seq_id, "broken")
            if math.isinf(value)
            else Verdict(step.seq_id, 0, 1, (Logprobs(value, (), ()),))
            for step, value in zip(steps, self.logprobs, strict=False)
        ]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_target_without_finite_logits_is_refused_and_one_with_a_broken_row_is_not(
    wrong: float,
) -> None:
    broken = ScoredTarget([wrong] * NUM_TRIED)
    with pytest.raises(ModelError, match="logits are not finite"):
        require_finite(broken)
    assert not broken.held
    assert broken.tokens == [0, 25, 50, 75], "of all of the vocabulary"
    require_finite(ScoredTarget([wrong] * (NUM_TRIED - 1) + [-0.5]))
    require_finite(FakeTarget(context=64))  # a rank that has no verdicts


def test_a_cache_of_one_page_has_room_for_one_token_that_is_tried() -> None:
    small = ScoredTarget([-1.0], num_pages=1)
    require_finite(small)
    assert small.tokens == [0]
