"""Workers of a role that are lost, restarted, and given up; requests end nowhere but elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from specserve.cluster.engine import supervisor as supervisor_module
from specserve.cluster.engine.group import TARGET
from specserve.cluster.engine.health import EngineHealth
from specserve.cluster.engine.pass_watch import PassWatch
from specserve.cluster.engine.remote import RemoteTarget
from specserve.cluster.engine.supervisor import WorkerSupervisor
from specserve.errors import Displaced, ModelError, WorkerLost
from specserve.types import Chunk, FinishReason, Request, Span, Warp
from specserve.wire.messages import Message, Verdicts, Verify
from tests.support.fakes import FakeTarget, model_info, open_coordinator, text

INFO = model_info()


class Client:
    """Link to a rank that computes at once, until it dies."""

    def __init__(self, *, dies_at_once: bool = False) -> None:
        self.dies_at_once = dies_at_once
        self.pass_seconds = 0.01
        self.model = FakeTarget(INFO)
        self.lost: WorkerLost | None = None
        self.on_prepared = self.on_silence = None
        self.is_late = False

    async def call(self, message: Verify, timeout_s: float) -> Message:
        await asyncio.sleep(0)
        if self.dies_at_once:
            self.lost = WorkerLost("it was killed")
        if self.lost is not None:
            raise self.lost
        await self.model.release(message.released)
        verdicts = await self.model.verify(message.steps)
        spans = (Span("verify", 0.0, self.pass_seconds),)
        return Verdicts(message.number, tuple(verdicts), 0.0, 0, spans=spans)

    def fail(self, error: WorkerLost) -> None:
        self.lost = self.lost or error

    def listen(self) -> None: ...
    def post(self, message: Message) -> None: ...


class Worker:
    """Worker without a process."""

    def __init__(self, *, dies_at_once: bool = False) -> None:
        self.role, self.client = TARGET, Client(dies_at_once=dies_at_once)
        self.run_call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_killed = False

    def stop(self) -> None: ...
    def kill(self) -> None:
        self.is_killed = True


class Scene:
    """An engine whose target has a supervisor; `start` gives each next worker, or raises."""

    def __init__(
        self,
        start: Callable[[], Worker],
        *,
        max_restarts: int | None = 2,
        watch: PassWatch | None = None,
        ranks: int = 1,
    ) -> None:
        self.started: list[Worker] = []
        self._start_one = start
        self.target = RemoteTarget(deadline_s=5.0, watch=watch)
        self.first = Worker()
        workers: Any = (self.first, *(Worker() for _ in range(ranks - 1)))
        self.failed: list[Any] = []
        self.supervisor = WorkerSupervisor(
            TARGET,
            workers,
            self.target,
            self._start,
            max_restarts=max_restarts,
            on_failure=self.failed.append,
        )
        self.texts: dict[int, tuple[int, ...]] = {}
        self.ends: dict[int, Chunk] = {}
        self.coordinator = open_coordinator(self.target, None, info=INFO, emit=self._receive)
        self.rounds = asyncio.ensure_future(self.coordinator.run())

    def submit(self, count: int, *, max_tokens: int) -> None:
        for i in range(count):
            request = Request((i, 2, 3), max_tokens, Warp(), seed=1)
            self.texts[self.coordinator.submit(request)] = ()

    async def has_tokens(self, count: int) -> None:
        while min(map(len, self.texts.values())) < count:
            await asyncio.sleep(0)

    @property
    def health(self) -> EngineHealth:
        group: Any = SimpleNamespace(
            is_lost=self.supervisor.has_given_up,
            troubles={} if self.supervisor.trouble is None else {TARGET: self.supervisor.trouble},
        )
        return EngineHealth(self.coordinator, group, self.rounds, round_deadline_s=5.0)

    async def _start(self) -> Any:
        worker = self._start_one()
        self.started.append(worker)
        return (worker,)

    def _receive(self, chunks: Any) -> None:
        for chunk in chunks:
            assert chunk.start == len(self.texts[chunk.seq_id]), "a token was lost or repeated"
            self.texts[chunk.seq_id] += chunk.tokens
            if chunk.finish is not None:
                self.ends[chunk.seq_id] = chunk


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_BACKOFF_S", 0.0)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(_all_of(scene), 20))


async def _all_of(scene: Callable[[], Awaitable[None]]) -> None:
    await scene()


def test_a_target_that_is_killed_again_and_again_is_replaced_and_no_token_is_lost() -> None:
    async def main() -> None:
        scene = Scene(Worker)
        scene.submit(3, max_tokens=60)
        for count in range(1, 8):
            await scene.has_tokens(5 * count)
            current = scene.started[-1] if scene.started else scene.first
            current.run_call.set_result(None)  # its process has ended
            while len(scene.started) < count:
                await asyncio.sleep(0)
        while len(scene.ends) < 3:
            await asyncio.sleep(0)
        assert list(scene.texts.values()) == [text((i, 2, 3), 60) for i in range(3)]
        assert scene.supervisor.num_restarts == 7
        assert all(worker.is_killed for worker in [scene.first, *scene.started[:-1]])
        assert scene.health.trouble is None
        await scene.supervisor.close()

    play(main)


def test_a_target_that_has_become_slow_is_replaced_past_the_limit_and_no_token_is_lost() -> None:
    async def main() -> None:
        now = [0.0]
        scene = Scene(Worker, watch=PassWatch(max_slow_s=60.0, clock=lambda: now[0]))
        scene.submit(3, max_tokens=300)
        await scene.has_tokens(100)
        scene.first.client.pass_seconds = 1.0
        await scene.has_tokens(130)
        assert scene.started == [], "it has not been slow for a minute"
        now[0] = 61.0
        while not scene.started:
            await asyncio.sleep(0)
        while len(scene.ends) < 3:
            await asyncio.sleep(0)
        assert list(scene.texts.values()) == [text((i, 2, 3), 300) for i in range(3)]
        assert (scene.supervisor.num_restarts, scene.first.is_killed) == (1, True)
        assert scene.supervisor.last_loss is not None, "why it was restarted"
        assert "times as long as usual" in scene.supervisor.last_loss
        assert scene.failed == [scene.first]
        assert scene.health.trouble is None
        await scene.supervisor.close()

    play(main)


@pytest.mark.parametrize("fault", ["cannot start", "dies in its first round"])
def test_a_supervisor_that_gives_up_sends_all_requests_back_and_the_replica_is_replaced(
    fault: str,
) -> None:
    def start() -> Worker:
        if fault == "cannot start":
            raise ModelError("no GPU is left")
        return Worker(dies_at_once=True)

    async def main() -> None:
        scene = Scene(start)
        scene.submit(4, max_tokens=1000)
        await scene.has_tokens(5)
        scene.health.check()
        scene.first.run_call.set_result(None)
        await scene.rounds
        assert scene.supervisor.has_given_up
        assert scene.supervisor.num_restarts == (0 if fault == "cannot start" else 3)
        assert scene.coordinator.can_resume_elsewhere
        assert [end.finish for end in scene.ends.values()] == [FinishReason.ERROR] * 4
        for i, tokens in enumerate(scene.texts.values()):
            assert tokens == text((i, 2, 3), len(tokens))
        with pytest.raises(Displaced):
            scene.coordinator.submit(Request((1, 2), 5, Warp(), seed=1))
        with pytest.raises(WorkerLost, match="the target") as unhealthy:
            scene.health.check()
        why = "no GPU is left" if fault == "cannot start" else "it was killed"
        assert why in str(unhealthy.value)

    play(main)


@pytest.mark.parametrize("how", ["it ends", "it falls silent", "a round fails"])
def test_of_several_ranks_the_one_that_failed_is_named_if_it_is_known(how: str) -> None:
    async def main() -> None:
        scene = Scene(Worker, ranks=2)
        second: Any = scene.supervisor.workers[1]
        if how == "it ends":
            second.run_call.set_result(None)
        elif how == "it falls silent":
            second.client.on_silence(WorkerLost("it is stopped"))
        else:
            scene.target.on_lost("the worker has not answered")
        while not scene.started:
            await asyncio.sleep(0)
        assert scene.failed == ([] if how == "a round fails" else [second])
        await scene.supervisor.close()

    play(main)


def test_a_drafts_supervisor_never_gives_up() -> None:
    tries = 0

    def start() -> Worker:
        nonlocal tries
        tries += 1
        if tries < 20:
            raise ModelError("no GPU is left")
        return Worker()

    async def main() -> None:
        scene = Scene(start, max_restarts=None)
        scene.first.run_call.set_result(None)
        while not scene.started:
            await asyncio.sleep(0)
        assert not scene.supervisor.has_given_up
        await scene.supervisor.close()

    play(main)
