"""Requests of one process, and what pauses, sleeps and resets of the prefix cache do to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specserve.errors import BadValue, Overloaded, Unavailable, WorkerLost
from specserve.features.ray_serve_llm.service import LocalService
from specserve.types import Chunk, FinishReason, Request
from tests.cluster.gateway.test_replicas import REQUEST, chunk
from tests.support.fakes import FakeTarget, model_info, open_coordinator, text

LONG = replace(REQUEST, max_tokens=40)


class FakeEngine:
    """A local service over a coordinator with a fake target."""

    def __init__(self) -> None:
        self.service = LocalService()
        info = model_info()
        self.target = FakeTarget(info)
        self.coordinator = open_coordinator(self.target, None, info=info, emit=self.service.emit)
        self.num_closed = 0
        self.attach()

    def attach(self) -> None:
        running: Any = SimpleNamespace(
            coordinator=self.coordinator, submit=self.coordinator.submit, close=self._close
        )
        self.service.attach(running)

    async def _close(self) -> None:
        self.num_closed += 1

    async def tokens(self, request: Request = REQUEST) -> tuple[int, ...]:
        return tuple([t async for chunk in self.service.generate(request) for t in chunk.tokens])


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


def test_requests_of_one_process_get_the_text_of_the_target() -> None:
    async def scenario() -> None:
        served = FakeEngine()
        tasks = [asyncio.create_task(served.tokens()) for _ in range(3)]
        rounds = asyncio.create_task(served.coordinator.run())
        for tokens in await asyncio.gather(*tasks):
            assert tokens == text(REQUEST.prompt, len(tokens))
            assert tokens
        assert not served.service._readers
        served.coordinator.close()
        await rounds

    run(scenario())


def test_a_request_whose_reader_leaves_is_cancelled() -> None:
    async def scenario() -> None:
        served = FakeEngine()
        task = asyncio.create_task(served.tokens())
        await asyncio.sleep(0)
        assert served.coordinator.has_work
        task.cancel()
        await asyncio.wait([task])
        await served.coordinator.round()
        assert not served.coordinator.has_work

    run(scenario())


def test_a_request_that_gives_its_place_or_loses_its_engine_gets_its_error() -> None:
    async def scenario() -> None:
        service, submitted = LocalService(), iter(range(10))
        coordinator = SimpleNamespace(
            submit=lambda request: next(submitted),
            cancel=lambda seq_id: pytest.fail("it has ended"),
            can_resume_elsewhere=True,
        )
        running: Any = SimpleNamespace(coordinator=coordinator, submit=coordinator.submit)
        service.attach(running)
        tasks = [asyncio.ensure_future(anext(service.generate(REQUEST))) for _ in range(2)]
        await asyncio.sleep(0)
        service.end(0, Overloaded("the queue is full"))
        failed: Chunk = chunk(1, 0, 4, FinishReason.ERROR)
        service.emit([failed])
        for task, kind in zip(tasks, (Overloaded, WorkerLost), strict=True):
            with pytest.raises(kind):
                await task

    run(scenario())


@asynccontextmanager
async def running_engine() -> AsyncIterator[FakeEngine]:
    served = FakeEngine()
    rounds = asyncio.create_task(served.coordinator.run())
    yield served
    served.coordinator.close()
    await rounds


async def reach(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0)


async def begin(served: FakeEngine) -> asyncio.Task[tuple[int, ...]]:
    """Start a long request, and return when some of its rounds have run."""
    num_rounds = served.coordinator.num_rounds
    task = asyncio.create_task(served.tokens(LONG))
    await reach(lambda: served.coordinator.num_rounds > num_rounds + 2)
    return task


def test_a_pause_ends_what_runs_and_later_requests_wait_for_its_end() -> None:
    async def scenario() -> None:
        async with running_engine() as served:
            task = await begin(served)
            await served.service.pause("abort", clear_cache=False)
            with pytest.raises(Unavailable, match="was paused"):
                await task
            assert not served.coordinator.has_work
            later = asyncio.create_task(served.tokens())
            await asyncio.sleep(0.02)
            assert not later.done()
            assert not served.coordinator.has_work
            served.service.resume()
            tokens = await later
            assert tokens == text(REQUEST.prompt, len(tokens))

    run(scenario())


def test_a_pause_that_waits_lets_texts_come_to_their_ends() -> None:
    async def scenario() -> None:
        async with running_engine() as served:
            task = await begin(served)
            await served.service.pause("wait", clear_cache=False)
            assert await task == text(LONG.prompt, LONG.max_tokens)
            assert served.service.is_paused

    run(scenario())


def test_a_pause_that_keeps_requests_runs_no_round_and_changes_no_text() -> None:
    async def scenario() -> None:
        async with running_engine() as served:
            task = await begin(served)
            await served.service.pause("keep", clear_cache=True)
            num_rounds = served.coordinator.num_rounds
            await asyncio.sleep(0.02)
            assert served.coordinator.num_rounds == num_rounds
            assert not task.done()
            served.service.resume()
            assert await task == text(LONG.prompt, LONG.max_tokens)
            await served.service.pause("keep", clear_cache=True)
        assert not served.coordinator.has_work, "a paused engine can be closed"

    run(scenario())


def test_an_unknown_mode_of_a_pause_is_refused_and_pauses_nothing() -> None:
    async def scenario() -> None:
        service = FakeEngine().service
        with pytest.raises(BadValue, match="mode must be one of abort, wait, keep, not now"):
            await service.pause("now", clear_cache=True)
        assert not service.is_paused

    run(scenario())


def test_after_a_reset_pages_have_other_salts_and_texts_are_the_same() -> None:
    async def scenario() -> None:
        async with running_engine() as served:
            first = await served.tokens()
            salts = [salts_of(served)]
            for _ in range(2):
                served.service.reset_prefix_cache()
                served.target.rounds.clear()
                assert await served.tokens() == first
                salts.append(salts_of(served))
            assert len(set.union(*salts)) == 3
            assert salts[0] == {b""}

    run(scenario())


def salts_of(served: FakeEngine) -> set[bytes]:
    return {step.policy.cache_salt for steps in served.target.rounds for step in steps}


def test_a_sleep_ends_the_workers_and_requests_wait_until_others_are_there() -> None:
    async def scenario() -> None:
        async with running_engine() as served:
            task = await begin(served)
            await served.service.pause("keep", clear_cache=False)
            await served.service.sleep()
            with pytest.raises(Unavailable):
                await task
            assert served.num_closed == 1
            status = await served.service.status()
            assert (status.ready, status.healthy) == (False, True)
            later = asyncio.create_task(served.tokens())
            served.service.resume()
            await asyncio.sleep(0.02)
            assert not later.done()
            assert not served.coordinator.has_work, "it sleeps, though no longer paused"
            served.attach()
            assert await later

    run(scenario())
