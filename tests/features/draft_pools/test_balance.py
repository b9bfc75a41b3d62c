"""The devices of a draft pool even out how many engines each drafts for."""

from __future__ import annotations

from specserve.features.draft_pools.balance import (
    ASK_AGAIN_S,
    SETTLED,
    UNCHECKED_S,
    HealthChecks,
    PoolBalance,
)
from tests.support.clock import Clock


class Device:
    """The balance of one device, with a clock of its own."""

    def __init__(self) -> None:
        self._clock = Clock()
        self.balance = PoolBalance("here", self._clock)

    def ask(
        self, engines: list[int], others: dict[str, int], *, reports: int = SETTLED
    ) -> list[int]:
        """Return all engines that are requested to move in `reports` reports, a second apart."""
        asked: list[int] = []
        for _ in range(reports):
            self._clock.now += 1.0
            asked += self.balance.engines_to_move(engines, {"here": 99, **others})
        return asked


def test_a_device_beside_a_new_one_gives_up_what_is_above_its_share() -> None:
    assert Device().ask([3, 5, 8, 9], {"new": 0}) == [8, 9]
    assert Device().ask([3, 5, 8], {"new": 0}) == [8], "an odd one stays"


def test_a_device_with_its_share_or_alone_gives_up_none() -> None:
    assert Device().ask([1, 2], {"other": 1}, reports=20) == []
    assert Device().ask([1, 2, 3], {}, reports=20) == []


def test_a_count_that_is_a_report_old_moves_no_engine() -> None:
    device = Device()
    for _ in range(5):
        assert device.ask([1, 2, 3, 4], {"new": 0}, reports=SETTLED - 1) == []
        assert device.ask([1, 2], {"new": 2}, reports=1) == []


def test_an_engine_that_has_not_moved_is_asked_again_after_a_while_and_no_other_meanwhile() -> None:
    device = Device()
    assert device.ask([1, 2], {"new": 0}) == [2]
    assert device.ask([1, 2], {"new": 0}, reports=int(ASK_AGAIN_S) - 2) == []
    assert device.ask([1, 2], {"new": 0}, reports=SETTLED + 2) == [2]


def test_a_device_that_leaves_gives_up_all_its_engines_at_once_if_there_is_another() -> None:
    balance = PoolBalance("here", lambda: 0.0)
    engines = [3, 5, 8]
    assert balance.engines_to_move(engines, {"here": 3}, is_leaving=True) == ()
    counts = {"here": 3, "other": 3}
    assert balance.engines_to_move(engines, counts, is_leaving=True) == (3, 5, 8)
    assert balance.engines_to_move(engines, counts, is_leaving=True) == (), "they were asked"


def test_a_replica_that_is_no_longer_examined_is_being_removed() -> None:
    now = 0.0
    checks = HealthChecks(lambda: now)
    now = 100.0
    assert not checks.have_ended(), "there was none yet"
    checks.note()
    now += UNCHECKED_S
    assert not checks.have_ended()
    now += 0.1
    assert checks.have_ended()
    checks.note()
    assert not checks.have_ended(), "the controller was only slow"
