"""A gateway of several models opens, and serves those whose engines are there."""

from __future__ import annotations

import asyncio

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from specserve.cluster import deployments
from specserve.cluster.board import releases
from specserve.cluster.board.releases import model_of
from specserve.cluster.board.status_board import EngineInfo
from specserve.cluster.deployments import _await_models
from tests.support.fakes import model_info

FAILED = DeploymentUnavailableError(DeploymentID("Engine-large", "app"))


class EngineHandle:
    """A handle whose deployment has failed once, and runs then."""

    def __init__(self) -> None:
        self.answers: list[EngineInfo | Exception] = [FAILED, EngineInfo(model_info())]

    @property
    def info(self) -> EngineHandle:
        return self

    async def remote(self) -> EngineInfo:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class BoardHandle:
    """A handle of a board to which no engine has reported."""

    @property
    def engine_info(self) -> BoardHandle:
        return self

    async def remote(self, name: str) -> None:
        return None


def test_a_failed_deployment_is_asked_again_unless_it_is_that_of_the_only_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases, "ASK_AGAIN_S", 0.0)
    assert asyncio.run(model_of(EngineHandle(), BoardHandle(), may_fail=False)) == model_info()
    with pytest.raises(DeploymentUnavailableError):
        asyncio.run(model_of(EngineHandle(), BoardHandle()))


def test_a_gateway_opens_without_a_model_whose_engines_do_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployments, "OTHERS_S", 0.01)

    async def opening() -> bool:
        comes, never = asyncio.Event(), asyncio.Event()
        comes.set()
        tasks = [asyncio.create_task(_wait(event)) for event in (never, comes)]
        async with asyncio.timeout(20):
            await _await_models(tasks)
        is_waiting = not tasks[0].done()
        tasks[0].cancel()
        return is_waiting

    assert asyncio.run(opening())


def test_a_model_that_cannot_be_opened_is_an_error_of_the_gateway() -> None:
    async def fail() -> None:
        raise ValueError("no tokenizer")

    async def opening() -> None:
        async with asyncio.timeout(20):
            never = asyncio.create_task(_wait(asyncio.Event()))
            try:
                await _await_models([never, asyncio.create_task(fail())])
            finally:
                never.cancel()

    with pytest.raises(ValueError, match="no tokenizer"):
        asyncio.run(opening())


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
