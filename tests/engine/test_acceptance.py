"""Acceptance by place and by sequence, of what was judged alone."""

from __future__ import annotations

import numpy as np
import pytest

from specserve.engine.acceptance import Acceptance
from specserve.engine.batch import Outcome


def test_drafts_past_a_refusal_are_neither_accepted_nor_refused() -> None:
    acceptance = Acceptance(4)
    for _ in range(500):
        acceptance.observe([Outcome(1, 4, 1)])
    assert acceptance.alpha == pytest.approx(0.5, abs=0.01)
    assert acceptance.profile[0] > 0.8
    assert acceptance.profile[1] < 0.25
    assert acceptance.profile[3] == pytest.approx(acceptance.alpha), (
        "a place that was never reached is taken for the mean"
    )


def test_a_sequence_that_is_better_than_most_is_believed_to_get_further() -> None:
    acceptance = Acceptance(6)
    for _ in range(60):
        acceptance.observe([Outcome(1, 6, 6), Outcome(2, 6, 0)])
    good, bad, new = acceptance.reaches([1, 2, 3])
    assert good[3] > new[3] > bad[3]
    assert (np.diff(good) <= 0).all()
    acceptance.keep([2])
    assert acceptance.reaches([1])[0] == pytest.approx(acceptance.reaches([3])[0]), (
        "what has gone is forgotten"
    )


def test_nothing_seen_wears_nothing_out() -> None:
    acceptance = Acceptance(4)
    before = acceptance.alpha
    for _ in range(10_000):
        acceptance.observe([])
    assert acceptance.alpha == before
