"""Gateways, engines and boards of two releases, as an update has them, refuse one another."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specserve.api.service import Status
from specserve.cluster.board import releases
from specserve.cluster.board.releases import await_gateways, model_of
from specserve.cluster.board.reporting import report_forever
from specserve.cluster.board.status_board import (
    ENGINE,
    GATEWAY,
    YOUNG_S,
    Board,
    EngineInfo,
    EngineKeys,
    GatewayAnswer,
    ReplicaReport,
)
from specserve.cluster.gateway.replicas import EngineReplicas
from specserve.cluster.transport.chunk_stream import ChunkReceiver
from specserve.metrics import Snapshot
from specserve.types import ModelInfo
from specserve.wire.version import VERSION
from tests.support.fakes import model_info

REPORT = ReplicaReport("e", ENGINE, None, Snapshot({}), engine_key=b"key")
GATEWAY_REPORT = ReplicaReport("g", GATEWAY, None, Snapshot({}))
OTHER: dict[str, Any] = {"version": VERSION + 1, "release": "9.9"}


def _as_before_versions(report: ReplicaReport) -> ReplicaReport:
    """Return what unpickling makes of the report of a release whose reports had no version."""
    earlier: Any = object.__new__(ReplicaReport)
    earlier.__setstate__(
        [report.replica, report.role, None, report.metrics, None, (), (), (), report.engine_key]
    )
    unpickled: ReplicaReport = earlier
    return unpickled


@pytest.mark.parametrize(
    "report",
    [replace(REPORT, **OTHER), _as_before_versions(REPORT)],
    ids=["another version", "before versions"],
)
def test_an_engine_of_another_release_is_named_and_does_not_count(report: ReplicaReport) -> None:
    board = Board()
    board.report(report)
    status = board.status()
    assert (status.healthy, status.replicas) == (False, 0)
    assert any("is not counted" in trouble for trouble in status.troubles)
    answer = board.report(GATEWAY_REPORT)
    assert answer is not None
    assert not answer.engines.keys, "no gateway takes its chunks"


def test_a_gateway_of_another_release_gets_no_answer() -> None:
    assert Board().report(replace(GATEWAY_REPORT, **OTHER)) is None


def test_a_message_of_a_later_release_with_more_fields_is_still_read_as_one() -> None:
    """The version comes first, so it can be read whatever follows."""
    state = pickle.loads(pickle.dumps(REPORT)).__getstate__()
    assert state[0] == VERSION
    later: Any = object.__new__(ReplicaReport)
    later.__setstate__([VERSION + 1, "9.9", *state[2:], "a field that this release lacks"])
    board = Board()
    assert board.report(later) is None
    assert "specserve 9.9" in board.status().why


def test_a_gateway_keeps_what_it_knows_while_the_board_is_of_another_release() -> None:
    healthy = Status(ready=True, healthy=True, replicas=2)

    class BoardHandle:
        answer = replace(healthy, **OTHER)

        @property
        def status(self) -> BoardHandle:
            return self

        async def remote(self, replica_id: str) -> Status:
            return self.answer

    async def statuses() -> None:
        board, clock = BoardHandle(), SimpleNamespace(now=100.0)
        replicas = EngineReplicas(
            None,
            board,
            ChunkReceiver("127.0.0.1"),
            replica_id="g",
            on_resume=lambda: None,
            clock=lambda: clock.now,
        )
        try:
            status = await replicas.status()
            assert (status.ready, "is of another release" in status.why) == (False, True)
            board.answer = healthy
            assert await replicas.status() == healthy
            board.answer = replace(healthy, **OTHER)
            assert await replicas.status() == healthy, "the last one that it could read"
        finally:
            replicas.close()

    asyncio.run(statuses())


def test_an_answer_of_another_release_counts_as_none() -> None:
    answers: list[GatewayAnswer | None] = []
    good = GatewayAnswer(EngineKeys(frozenset(), is_complete=True), {})

    class BoardHandle:
        given = iter([replace(good, **OTHER), good])

        @property
        def report(self) -> BoardHandle:
            return self

        async def remote(self, report: ReplicaReport) -> GatewayAnswer:
            return next(self.given)

    async def two_answers() -> None:
        asked, seen = asyncio.Event(), asyncio.Event()

        def on_answer(answer: GatewayAnswer | None) -> None:
            answers.append(answer)
            if len(answers) == 2:
                seen.set()
            asked.set()

        reports = asyncio.create_task(
            report_forever(BoardHandle(), lambda: GATEWAY_REPORT, on_answer, asked)
        )
        async with asyncio.timeout(20):
            await seen.wait()
        reports.cancel()

    asyncio.run(two_answers())
    assert answers == [None, good]


class Handle:
    """A handle whose one method gives answers, the last of them for ever."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    def __getattr__(self, name: str) -> Handle:
        return self

    async def remote(self, *arguments: object) -> object:
        await asyncio.sleep(0)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def test_a_new_gateway_waits_for_an_engine_of_its_own_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases, "ASK_AGAIN_S", 0.0)
    model = model_info()
    other = replace(EngineInfo(model), **OTHER)
    engine, no_report = Handle(model, other, EngineInfo(model)), Handle(None)
    assert asyncio.run(model_of(engine, no_report)) is model
    assert len(engine.answers) == 1, "the first two were of other releases"


def test_a_new_gateway_opens_by_the_report_of_an_engine_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases, "ASK_AGAIN_S", 0.0)
    model = model_info()
    board = Handle(None, replace(EngineInfo(model), **OTHER), EngineInfo(model))
    engine = Handle(replace(EngineInfo(model), **OTHER))

    async def opened() -> ModelInfo:
        async with asyncio.timeout(20):
            return await model_of(engine, board)

    assert asyncio.run(opened()) is model


def test_a_board_knows_whether_new_gateways_have_replaced_those_of_another_release() -> None:
    now = 0.0
    board = Board(lambda: now, min_gateways=2)
    assert board.awaits_gateways() is None, "none has had time to report"
    now += YOUNG_S
    assert board.awaits_gateways() is False, "no update"
    board.report(replace(GATEWAY_REPORT, **OTHER))
    board.report(replace(REPORT, info=EngineInfo(model_info())))
    assert board.awaits_gateways() is True
    info = board.engine_info()
    assert info is not None
    assert board.engine_info("another model") is None
    board.report(GATEWAY_REPORT)
    assert board.awaits_gateways() is True, "one of two"
    board.report(replace(GATEWAY_REPORT, replica="g2"))
    assert board.awaits_gateways() is False


def test_an_engine_serves_once_the_gateways_of_its_release_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases, "ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(releases, "SWITCH_S", 0.0)
    board = Handle(None, True, True, False)
    asyncio.run(await_gateways(board))
    assert board.answers == [False]
    asyncio.run(await_gateways(Handle(True), wait_s=0.01))
