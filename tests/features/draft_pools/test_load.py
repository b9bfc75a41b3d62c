"""The load of a shared draft is what it is whether proposals were prepared or not."""

from __future__ import annotations

import pytest

from specserve.features.draft_pools.load import DraftLoad
from specserve.types import Proposal


def proposal(*, tokens: int = 3, anticipated: bool | None = False) -> Proposal:
    return Proposal(0, 1, (7,) * tokens, None, 1, anticipated=anticipated)


def test_a_batch_that_was_prepared_counts_as_those_that_were_not() -> None:
    load = DraftLoad()
    for _ in range(4):
        load.record(0.2, [proposal()], waited_s=0.2)
    load.record(0.001, [proposal(anticipated=True)], waited_s=0.001)
    assert load.seconds == pytest.approx(1.0)


def test_prefills_count_and_say_nothing_about_the_time_of_a_draft() -> None:
    load = DraftLoad()
    load.record(5.0, [proposal(tokens=0, anticipated=None)], waited_s=5.0)
    load.record(0.01, [proposal(anticipated=True)], waited_s=0.01)
    assert load.seconds == pytest.approx(5.01)


def test_a_batch_that_took_longer_than_usual_counts_as_long_as_it_took() -> None:
    load = DraftLoad()
    load.record(0.1, [proposal()], waited_s=0.1)
    load.record(0.3, [proposal(anticipated=True), proposal()], waited_s=0.3)
    assert load.seconds == pytest.approx(0.4)
