"""Loads at which first tokens come too late, from a clock that the test sets."""

from __future__ import annotations

import pytest

from specserve.engine.first_tokens import HALF_LIFE_S, FirstTokenRecord
from specserve.types import Chunk, FinishReason, Request, Warp
from tests.support.clock import Clock

TARGET_S = 1.0
CURVE = ((1, 0.01), (100, 0.1))  # so that 1,000 tokens take a second


class TimedRecord:
    """A record with the clock of its test, fed with requests one after the other."""

    def __init__(self, target_s: float = TARGET_S) -> None:
        self.clock = Clock()
        self.record = FirstTokenRecord(target_s, CURVE, clock=self.clock)
        self._count = 0

    def answer(
        self,
        seconds: float,
        *,
        load: int,
        times: int = 1,
        prompt: int = 1,
        generated: tuple[int, ...] = (),
    ) -> None:
        for _ in range(times):
            self._count += 1
            request = Request((1,) * prompt, 9, Warp(), seed=0, generated=generated)
            self.record.begin(self._count, request, load=load)
            self.clock.now += seconds
            self.record.observe([chunk(self._count, 0, (5,)), chunk(self._count, 1, (6,))])


def chunk(seq_id: int, start: int, tokens: tuple[int, ...]) -> Chunk:
    return Chunk(seq_id, start, tokens, ())


def test_no_limit_is_known_while_first_tokens_are_on_time() -> None:
    engine = TimedRecord()
    engine.answer(0.9, load=8, times=50)
    assert engine.record.limit is None
    assert engine.record.highest_load == pytest.approx(8, rel=0.25)


def test_the_limit_lies_below_the_lowest_load_that_is_too_late() -> None:
    engine = TimedRecord()
    engine.answer(0.9, load=4, times=20)
    engine.answer(1.1, load=8, times=3)
    engine.answer(1.5, load=16, times=3)
    assert engine.record.limit is not None
    assert 4 <= engine.record.limit < 8


def test_two_late_first_tokens_prove_nothing() -> None:
    engine = TimedRecord()
    engine.answer(1.1, load=8, times=2)
    assert engine.record.limit is None


@pytest.mark.parametrize(("late", "limited"), [(6, False), (12, True)])
def test_a_share_that_chance_explains_is_no_limit(late: int, limited: bool) -> None:
    """Check a hundred first tokens, of which five may be late, and four more by chance."""
    engine = TimedRecord()
    engine.answer(0.1, load=8, times=100 - late)
    engine.answer(1.1, load=8, times=late)
    assert (engine.record.limit is not None) == limited


def test_late_first_tokens_fade() -> None:
    engine = TimedRecord()
    engine.answer(1.1, load=8, times=4)
    assert engine.record.limit is not None
    engine.clock.now += HALF_LIFE_S
    assert engine.record.limit is None


def test_a_long_prompt_on_an_idle_engine_is_not_late() -> None:
    engine = TimedRecord()
    engine.answer(1.8, load=1, times=9, prompt=1000)
    assert engine.record.limit is None
    engine.answer(2.0, load=1, times=9, prompt=1000)
    assert engine.record.limit == 1.0


def test_a_request_that_another_engine_began_is_left_out() -> None:
    engine = TimedRecord()
    engine.answer(5.0, load=8, times=9, generated=(1,))
    assert engine.record.limit is None
    assert engine.record.highest_load == 0.0


def test_requests_that_end_without_a_token_are_dropped() -> None:
    record = FirstTokenRecord(TARGET_S, ())
    for seq_id in range(2):
        record.begin(seq_id, Request((1,), 9, Warp(), seed=0), load=1)
    record.observe([Chunk(0, 0, (), (), finish=FinishReason.CANCELLED)])
    record.drop(1)
    assert not record._waits
