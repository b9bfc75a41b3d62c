"""The curve of a target's passes, as its warm-up finds it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from specserve.models.warmup import ROWS, warm_up
from specserve.types import VerifyStep


class Model:
    """Takes 1 ms, and 0.1 ms more for each row."""

    def __init__(self, *, context: int, slow: float = 1.0) -> None:
        self.info = SimpleNamespace(
            max_context=context, num_pages=1000, page_size=16, decoder_start=None
        )
        self.now, self.slow = 0.0, slow
        self.held: set[int] = set()

    def verify(self, steps: Sequence[VerifyStep]) -> list[object]:
        self.now += self.slow * (
            1e-3 + 1e-4 * sum(len(step.tokens) + len(step.drafts) for step in steps)
        )
        self.held |= {step.seq_id for step in steps}
        return []

    def release(self, seq_ids: Sequence[int]) -> None:
        self.held -= set(seq_ids)


def test_the_seconds_of_each_number_of_rows_are_found_and_nothing_is_left_behind() -> None:
    model = Model(context=4096)
    curve = dict(warm_up(model, clock=lambda: model.now))  # type: ignore[arg-type]
    assert tuple(curve) == ROWS
    assert abs(curve[64] - 7.4e-3) < 1e-9
    assert not model.held


def test_a_short_context_and_a_slow_machine_are_not_asked_too_much() -> None:
    short, slow = Model(context=20), Model(context=4096, slow=200.0)
    assert max(rows for rows, _ in warm_up(short, clock=lambda: short.now)) == 16  # type: ignore[arg-type]
    warm_up(slow, clock=lambda: slow.now)  # type: ignore[arg-type]
    assert slow.now < 5
    assert len(warm_up(slow, clock=lambda: slow.now, timed=False)) == len(ROWS), (
        "ranks must all do the same, however slow"
    )  # type: ignore[arg-type]
