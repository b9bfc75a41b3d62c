"""Status board: what gateways learn about engines that report, hang, or are gone."""

from __future__ import annotations

import asyncio

import pytest

from specserve.api.service import PoolStatus
from specserve.cli.console import StatusLine, StatusScreen
from specserve.cluster.board import reporting, status_board
from specserve.cluster.board.reporting import report_forever
from specserve.cluster.board.status_board import (
    ENGINE,
    GATEWAY,
    POOL,
    SILENT_AFTER_S,
    Answer,
    Board,
    EngineInfo,
    EngineKeys,
    GatewayAnswer,
    PoolAnswer,
    ReplicaReport,
)
from specserve.metrics import Registry, Snapshot, merge
from specserve.types import ModelInfo
from tests.support.clock import Clock


def snapshot(written: int, running: int = 0) -> Snapshot:
    registry = Registry()
    registry.counter("generation_tokens_total").add(written)
    registry.gauge("num_requests_running").set(running)
    return registry.snapshot()


def written(board: Board) -> float:
    return merge(board.status().metrics).samples["generation_tokens_total"][()][0]


def device(replica: str, pool: str, *, engines: int, busy: float) -> ReplicaReport:
    return ReplicaReport(replica, POOL, None, Snapshot({}), pool=PoolStatus(pool, 1, engines, busy))


def test_a_device_of_a_pool_learns_the_engines_of_the_others_and_a_status_has_the_sum() -> None:
    board = Board()
    board.report(device("a", "shared", engines=3, busy=0.75))
    board.report(device("x", "other", engines=2, busy=0.5))
    answer = board.report(device("b", "shared", engines=1, busy=0.25))
    assert isinstance(answer, PoolAnswer)
    assert answer.engines == {"a": 3, "b": 1}
    assert board.status().pools == (
        PoolStatus("other", 1, 2, 0.5),
        PoolStatus("shared", 2, 4, 0.5),
    )
    page = StatusScreen(title="it", hints=()).render(board.status())
    assert "draft pool shared: 2 devices for 4 engines, 50% busy" in page.plain
    assert "draft pool other: 1 device for 2 engines, 50% busy" in page.plain


def test_without_engines_there_is_no_health() -> None:
    status = Board().status()
    assert not status.healthy
    assert status.why == "no engine replica reports"


def test_where_engines_may_sleep_having_none_is_healthy_and_one_in_trouble_is_not() -> None:
    board = Board(may_sleep=True)
    assert board.status().healthy
    board.report(ReplicaReport("a", ENGINE, "a worker died", snapshot(0)))
    assert not board.status().healthy


def test_one_engine_that_makes_progress_is_enough() -> None:
    board = Board()
    board.report(ReplicaReport("a", ENGINE, "a worker died", snapshot(0)))
    assert board.status().why == "a worker died"
    board.report(ReplicaReport("b", ENGINE, None, snapshot(0)))
    assert (board.status().healthy, board.status().replicas) == (True, 2)


def test_a_gateway_is_no_engine() -> None:
    board = Board()
    board.report(ReplicaReport("g", GATEWAY, None, snapshot(3)))
    assert (board.status().healthy, board.status().replicas) == (False, 0)
    assert written(board) == 3


def test_sums_never_fall_when_a_replica_goes() -> None:
    clock = Clock()
    board = Board(clock)
    board.report(ReplicaReport("a", ENGINE, None, snapshot(10, running=2)))
    clock.now = SILENT_AFTER_S + 1
    board.report(ReplicaReport("b", ENGINE, None, snapshot(5, running=1)))
    assert written(board) == 15
    assert merge(board.status().metrics).samples["num_requests_running"][()][0] == 1, (
        "what is gone runs nothing"
    )
    clock.now *= 3
    assert written(board) == 15
    assert not board.status().healthy


def test_a_replica_that_comes_back_is_counted_once() -> None:
    """A pause of a process, or of its node, may be longer than the board's patience."""
    clock = Clock()
    board = Board(clock)
    board.report(ReplicaReport("g", GATEWAY, None, snapshot(10)))
    clock.now = SILENT_AFTER_S + 1
    assert written(board) == 10
    assert merge(board.status("g").metrics).samples == {}, "it knows its own"
    board.report(ReplicaReport("g", GATEWAY, None, snapshot(12)))
    assert written(board) == 12


def test_the_sums_of_very_many_replicas_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_board, "MAX_SILENT", 3)
    clock = Clock()
    board = Board(clock)
    for number in range(10):
        board.report(ReplicaReport(str(number), ENGINE, None, snapshot(1)))
        clock.now += SILENT_AFTER_S + 1
        assert written(board) == number + 1
    assert len(board.status().metrics) == 4


def test_a_gateway_can_exclude_its_own_metrics() -> None:
    board = Board()
    board.report(ReplicaReport("g", GATEWAY, None, snapshot(3)))
    board.report(ReplicaReport("h", GATEWAY, None, snapshot(4)))
    assert (
        sum(one.samples["generation_tokens_total"][()][0] for one in board.status("g").metrics) == 4
    )


def test_a_line_of_status_is_printed_when_there_is_something_new() -> None:
    board, status_line = Board(), StatusLine()
    board.report(ReplicaReport("a", ENGINE, None, snapshot(0)))
    assert status_line.next(board.status(), 1.0) == "0 running, 0 waiting on 1 engines"
    assert status_line.next(board.status(), 2.0) is None
    board.report(ReplicaReport("a", ENGINE, None, snapshot(30, running=2)))
    assert status_line.next(board.status(), 4.0) == "2 running, 0 waiting on 1 engines, 15 tokens/s"
    board.report(ReplicaReport("a", ENGINE, "a round does not end", snapshot(30)))
    assert status_line.next(board.status(), 5.0) == "not healthy: a round does not end"


def test_the_board_names_each_placement_of_the_drafts_once() -> None:
    board = Board()
    for replica, placement in (("a", "apart"), ("b", "together"), ("c", "apart"), ("d", None)):
        board.report(ReplicaReport(replica, ENGINE, None, Snapshot({}), placement))
    assert board.status().draft_placements == ("apart", "together")


def test_the_board_names_each_reason_why_engines_are_not_reproducible_once() -> None:
    board = Board()
    for replica, reason in (("a", "experts"), ("b", None), ("c", "experts"), ("d", "a GPU")):
        info = EngineInfo(ModelInfo(8, 8, frozenset(), 4, 4, irreproducible=reason))
        board.report(ReplicaReport(replica, ENGINE, None, Snapshot({}), info=info))
    assert board.status().irreproducible == ("a GPU", "experts")
    named = ReplicaReport("a", ENGINE, None, Snapshot({}), model="one", info=info)
    board.report(named)
    assert "one: a GPU" in board.status().irreproducible


def test_gateways_get_the_keys_of_the_engines_that_report() -> None:
    clock = Clock()
    board = Board(clock)

    def report(replica: str, role: str, key: bytes | None = None) -> EngineKeys | None:
        answer = board.report(ReplicaReport(replica, role, None, Snapshot({}), engine_key=key))
        return answer.engines if isinstance(answer, GatewayAnswer) else None

    assert report("a", ENGINE, b"key of a") is None
    assert report("g", GATEWAY) == EngineKeys(frozenset({b"key of a"}), is_complete=False)
    clock.now += 4.0
    report("b", ENGINE, b"key of b")
    both = frozenset({b"key of a", b"key of b"})
    assert report("g", GATEWAY) == EngineKeys(both, is_complete=False), "the board is young"
    clock.now += 2.0
    assert report("g", GATEWAY) == EngineKeys(frozenset({b"key of b"}), is_complete=True)


def test_a_gateway_that_meets_an_unknown_engine_asks_the_board_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reporting, "REPORT_EVERY_S", 1000.0)
    answers: list[Answer | None] = []
    board = Board(Clock())

    class Handle:
        @property
        def report(self) -> Handle:
            return self

        async def remote(self, report: ReplicaReport) -> Answer | None:
            return board.report(report)

    async def main() -> None:
        wanted = asyncio.Event()
        task = asyncio.create_task(
            report_forever(
                Handle(),
                lambda: ReplicaReport("g", GATEWAY, None, Snapshot({})),
                answers.append,
                wanted,
            )
        )
        async with asyncio.timeout(10):
            while not answers:
                await asyncio.sleep(0.005)
            board.report(ReplicaReport("a", ENGINE, None, Snapshot({}), engine_key=b"key"))
            wanted.set()
            while len(answers) < 2:
                await asyncio.sleep(0.005)
        keys = [answer.engines.keys for answer in answers if answer is not None]
        assert keys == [frozenset(), frozenset({b"key"})]
        task.cancel()

    asyncio.run(main())


def test_a_model_in_trouble_is_named_and_takes_no_gateway_from_the_others() -> None:
    board = Board(models={"small": False, "large": False, "asleep": True})
    board.report(ReplicaReport("a", ENGINE, None, snapshot(3).of_model("small"), model="small"))
    board.report(ReplicaReport("b", ENGINE, "a worker died", Snapshot({}), model="large"))
    status = board.status()
    assert (status.ready, status.healthy, status.replicas) == (True, True, 2)
    assert {one.name: (one.healthy, one.why, one.replicas) for one in status.models} == {
        "small": (True, "", 1),
        "large": (False, "a worker died", 1),
        "asleep": (True, "", 0),
    }
    assert status.troubles == ("large: a worker died",)
    assert merge(status.metrics).samples["generation_tokens_total"] == {("small",): (3.0,)}


def test_where_no_model_has_an_engine_that_is_well_each_is_named() -> None:
    board = Board(models={"small": False, "large": False})
    board.report(ReplicaReport("b", ENGINE, "a worker died", Snapshot({}), model="large"))
    status = board.status()
    assert not status.healthy
    assert status.why == "large: a worker died; small: no engine replica reports"
