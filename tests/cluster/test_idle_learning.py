"""A worker learns while it has no message, answers those that come, and reports, over a link."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from specserve.cluster import idle_learning
from specserve.cluster.group import DRAFT, TARGET, WorkerGroup
from specserve.cluster.idle_learning import IdleLearning
from specserve.cluster.placement import bundles
from specserve.cluster.transport.endpoint import KeyPair
from specserve.cluster.transport.link import Client, Server
from specserve.cluster.workers import _serve
from specserve.config.tree import config_from_keys
from specserve.learning_progress import LearningProgress
from specserve.wire.messages import Message, Stop, Verdicts, Verify

SECONDS = 30.0


class Learner:
    """A learner that has work for some steps after each message."""

    def __init__(self, num_steps: int) -> None:
        self.left, self._num_steps, self.steps = 0, num_steps, 0
        self.idle = SimpleNamespace(on_message=self._on_message, on_answer=lambda: None)

    def _on_message(self) -> None:
        self.left = self._num_steps

    def step(self, has_message: Any) -> float | None:
        if not self.left:
            return None
        self.left, self.steps = self.left - 1, self.steps + 1
        return 0.001

    @property
    def progress(self) -> LearningProgress:
        return LearningProgress(self.steps, 1, 0, None, 0.5)


def answer(message: Message) -> Message:
    assert isinstance(message, Verify)
    return Verdicts(message.number, (), 0.0, 0)


def test_a_worker_learns_between_messages_and_the_engine_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle_learning, "REPORT_INTERVAL_S", 0.01)
    keys = KeyPair.generate()
    server = Server(KeyPair.generate(), "127.0.0.1", keys.public)
    learner: Any = Learner(num_steps=20)

    def work() -> None:
        learning = IdleLearning(learner, server)
        _serve(server, answer, lambda: None, spin_s=0.0, learning=learning)

    thread = threading.Thread(target=work)
    thread.start()

    async def main() -> None:
        client = Client(keys, server.address)
        reported = asyncio.Queue[LearningProgress]()
        client.on_learning = reported.put_nowait
        for number in (1, 2, 3):
            given = await client.call(Verify(number, (), ()), SECONDS)
            assert given == Verdicts(number, (), 0.0, 0)
        while (await reported.get()).steps < 20 or learner.left:
            pass  # the rest is learned without another message
        client.post(Stop())
        await asyncio.to_thread(thread.join, SECONDS)
        client.close()

    async def limited() -> None:
        async with asyncio.timeout(SECONDS):
            await main()

    asyncio.run(limited())
    assert not thread.is_alive()
    assert not learner.left


@pytest.mark.parametrize(
    ("keys", "roles", "learns"),
    [
        ({"draft.learn": True, "draft.placement": "apart"}, (TARGET, DRAFT), True),
        ({"draft.learn": True, "draft.placement": "apart"}, (TARGET,), False),
        ({"draft.learn": True, "draft.placement": "together"}, (TARGET,), True),
        ({"draft.learn": True, "draft.placement": "together"}, (), False),
        ({"draft.placement": "apart"}, (TARGET, DRAFT), False),
        ({"draft.kind": "bigram", "draft.learn": True}, (TARGET, DRAFT), False),
    ],
)
def test_an_engine_learns_while_the_worker_that_trains_its_draft_is_there(
    keys: dict[str, object], roles: tuple[str, ...], learns: bool
) -> None:
    config = config_from_keys(keys)
    group = WorkerGroup(config, bundles(config, has_gpus=False), KeyPair.generate(), None, None)
    workers = tuple(SimpleNamespace(role=role) for role in roles)
    supervisors: Any = (SimpleNamespace(workers=workers),)
    group.supervisors = supervisors
    assert group.learns is learns
