"""Engines that share a draft pool: texts, fair shares, and a pool that dies and returns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from specserve.cluster.engine.remote import RemoteDrafter
from specserve.cluster.engine.supervisor import WorkerSupervisor
from specserve.cluster.engine.worker_host import WorkerPlace, WorkerReady
from specserve.cluster.transport.endpoint import KeyPair
from specserve.cluster.transport.link import Client
from specserve.drafters.branches import Fanout
from specserve.drafters.registry import OpenDrafter
from specserve.errors import ConfigError, OutOfPages, WorkerLost
from specserve.features.draft_pools import link as pool_link
from specserve.features.draft_pools import worker as pool_worker
from specserve.features.draft_pools.link import EngineDevices, JoiningEngine
from specserve.features.draft_pools.split import SplitDrafter
from specserve.features.draft_pools.worker import PoolWorker
from specserve.llm.inprocess import LocalTarget
from specserve.models.model import open_model
from specserve.types import Chunk, DraftStep, ModelInfo, Policy, Proposal, Request, Warp
from specserve.wire.messages import Proposals, Propose
from tests.support import checkpoints
from tests.support.engines import (
    Answer,
    Engine,
    RandomPacer,
    greedy,
    load_drafter,
    load_target,
    model_options,
)
from tests.support.fakes import model_info, open_coordinator

HOST = "127.0.0.1"
PATIENCE_S = 120.0
LENGTHS = (3, 17, 40, 5, 64, 31)
MAX_TOKENS = 60


class Models:
    """Two targets of one family, a draft of both, and what each target alone writes."""

    def __init__(self, root: Path) -> None:
        first = checkpoints.make("llama", root / "target")
        self.targets = [first, checkpoints.perturb(first, root / "other", 0.05, seed=2)]
        self.draft = checkpoints.perturb(first, root / "draft", 0.05)
        self.num_opened = 0
        rng = np.random.default_rng(0)
        vocab = load_target(first, model_options()).info.vocab_size
        prompts = [rng.integers(0, vocab, length).tolist() for length in LENGTHS]
        sampled = [
            Request(tuple(prompt), MAX_TOKENS, Warp(temperature=1.0), seed=seed, seeded=True)
            for seed, prompt in enumerate(prompts)
        ]
        self.requests = [[*greedy(prompts, max_tokens=MAX_TOKENS), *sampled], sampled[::-1]]
        self.texts = [
            Engine(target).run(requests, drafts=False).texts
            for target, requests in zip(self.targets, self.requests, strict=True)
        ]

    def open_drafter(self, info: ModelInfo, *, pages: int = 400) -> OpenDrafter:
        self.num_opened += 1
        opened = open_model(self.draft, model_options(pages=pages))
        neural = load_drafter(opened, info, support=64)
        return OpenDrafter(
            neural,
            context=neural.context,
            runners=(opened.runner,),
            fanout=Fanout(),
        )


@pytest.fixture(scope="module")
def models(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("pool"))


class Pool:
    """A pool in a thread of this process, and another one each time that it is started again."""

    def __init__(
        self, open_drafter: Callable[[ModelInfo], OpenDrafter], *, max_places: int = 64
    ) -> None:
        self._open, self._max_places = open_drafter, max_places
        self.start()

    def start(self) -> None:
        self.worker = PoolWorker(self._open, HOST, page_size=16, max_places=self._max_places)
        self._thread = threading.Thread(target=self.worker.run)
        self._thread.start()

    def stop(self) -> None:
        self.worker.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    async def join(self, engine: JoiningEngine) -> AsyncGenerator[WorkerReady]:
        """Join as a deployment lets engines do: the membership lasts as long as the pool."""
        worker = self.worker
        members = worker.membership(engine.public_key, engine.target)
        async with aclosing(members) as membership:
            async for opened in membership:
                place = WorkerPlace("here", id(worker), opened.device, ())
                yield WorkerReady(worker.address, place, opened.context, opened.num_pages)


@contextmanager
def pool_of(models: Models, *, pages: int = 400, max_places: int = 64) -> Iterator[Pool]:
    pool = Pool(lambda info: models.open_drafter(info, pages=pages), max_places=max_places)
    try:
        yield pool
    finally:
        pool.stop()


class PooledEngine:
    """A target and a coordinator in this process, with links to devices of a pool."""

    def __init__(self, models: Models, number: int, *, devices: int = 1) -> None:
        self._target = load_target(models.targets[number], model_options())
        self.drafters = [RemoteDrafter(deadline_s=PATIENCE_S) for _ in range(devices)]
        self.answers: dict[int, Answer] = {}
        self.coordinator = open_coordinator(
            LocalTarget(self._target),
            self.drafters[0] if devices == 1 else SplitDrafter(self.drafters),
            info=self._target.info,
            emit=self._receive,
            remote_workers=True,
        )
        self.coordinator.pacer = RandomPacer(max_gamma=6, seed=number)  # type: ignore[assignment]
        for request in models.requests[number]:
            self.answers[self.coordinator.submit(request)] = Answer()

    async def connect(self, pool: Any) -> None:
        devices = EngineDevices(pool.join)
        self.supervisors = []
        for drafter in self.drafters:
            start = partial(devices.join, "draft", self._target.info)
            self.supervisors.append(
                WorkerSupervisor("draft", await start(), drafter, start, max_restarts=None)
            )

    async def close(self) -> None:
        await asyncio.gather(*(supervisor.close() for supervisor in self.supervisors))

    async def run(self, while_: Callable[[], bool] = lambda: True) -> None:
        """Run rounds as long as there is work and the condition holds."""
        while self.coordinator.has_work and while_():
            await self.coordinator.round()
            await asyncio.sleep(0)

    async def run_rounds(self, count: int) -> None:
        stop = self.coordinator.num_rounds + count
        await self.run(lambda: self.coordinator.num_rounds < stop)

    def has_restarted(self, times: int) -> bool:
        return self.supervisors[0].num_restarts == times

    @property
    def texts(self) -> list[tuple[int, ...]]:
        return [answer.tokens for answer in self.answers.values()]

    @property
    def drafted(self) -> int:
        return sum(answer.stats.drafted for answer in self.answers.values() if answer.stats)

    def _receive(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self.answers[chunk.seq_id].add(chunk)


def run(main: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await main

    asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engines know nothing of the pool's process, which is their own here."""

    async def unknown(node: str, pid: int) -> bool | None:
        return None

    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(pool_link, "process_runs_on", unknown)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)


@pytest.mark.parametrize(("pages", "max_places"), [(400, 64), (24, 64), (400, 3)])
def test_engines_of_two_targets_with_the_same_ids_that_share_a_pool_write_what_each_writes_alone(
    models: Models, pages: int, max_places: int
) -> None:
    """A pool of 24 pages holds few of the 18 texts, and one of 3 places drafts for few."""
    opened_before = models.num_opened
    with pool_of(models, pages=pages, max_places=max_places) as pool:
        engines = [PooledEngine(models, number) for number in range(2)]

        async def main() -> None:
            for engine in engines:
                await engine.connect(pool)
            await asyncio.gather(*(engine.run() for engine in engines))
            await asyncio.gather(*(engine.close() for engine in engines))
            await until(lambda: pool.worker.num_engines == 0)

        run(main())
        assert [engine.texts for engine in engines] == models.texts
        assert all(engine.drafted for engine in engines)
        assert models.num_opened == opened_before + 1, "one draft in memory"
        assert pool.worker.num_batches < pool.worker.num_rounds, "both targets shared batches"


def test_a_pool_that_dies_and_returns_loses_nothing_and_drafts_again(models: Models) -> None:
    with pool_of(models) as pool:
        engines = [PooledEngine(models, number) for number in range(2)]

        async def run_beside_deaths(engine: PooledEngine) -> None:
            for number in (1, 2):
                await engine.run(lambda: pool.worker.num_rounds < 3)
                assert pool.worker.num_rounds >= 3
                await asyncio.to_thread(pool.stop)
                await engine.run_rounds(2)  # without drafts
                pool.start()
                await until(partial(engine.has_restarted, number))
            await engine.run()

        async def main() -> None:
            for engine in engines:
                await engine.connect(pool)
            await asyncio.gather(run_beside_deaths(engines[0]), engines[1].run())
            assert pool.worker.num_rounds, "the last pool has drafted"
            await asyncio.gather(*(engine.close() for engine in engines))

        run(main())
        assert [engine.texts for engine in engines] == models.texts


class PoolOfTwo:
    """A pool that lets each engine join the device with fewer members, as Serve does."""

    def __init__(self, *devices: Pool) -> None:
        self.devices = devices

    async def join(self, joining: JoiningEngine) -> AsyncGenerator[WorkerReady]:
        device = min(self.devices, key=lambda each: each.worker.num_engines)
        async with aclosing(device.join(joining)) as members:
            async for ready in members:
                yield ready


def test_an_engine_on_two_devices_drafts_on_both_and_goes_on_with_one_when_the_other_dies(
    models: Models,
) -> None:
    with pool_of(models) as first, pool_of(models) as second:
        engine = PooledEngine(models, 0, devices=2)

        async def main() -> None:
            await engine.connect(PoolOfTwo(first, second))
            assert (first.worker.num_engines, second.worker.num_engines) == (1, 1)
            await engine.run(lambda: min(first.worker.num_rounds, second.worker.num_rounds) < 3)
            assert engine.coordinator.has_work, "both have drafted"
            await asyncio.to_thread(second.stop)
            await until(lambda: engine.drafters[1].is_away)
            before = first.worker.num_rounds
            await engine.run(lambda: first.worker.num_rounds < before + 3)
            assert engine.coordinator.has_work, "the one that is left drafts"
            second.start()
            await until(lambda: second.worker.num_engines == 1)
            await engine.run()
            await engine.close()
            await until(lambda: first.worker.num_engines + second.worker.num_engines == 0)

        run(main())
        assert engine.texts == models.texts[0]


def test_an_engine_is_no_member_of_one_device_twice(models: Models) -> None:
    with pool_of(models) as only:

        async def main() -> None:
            devices = EngineDevices(only.join)
            (link,) = await devices.join("draft", model_info())
            with pytest.raises(WorkerLost, match="no other device of the draft pool"):
                await devices.join("draft", model_info())
            await until(lambda: only.worker.num_engines == 1)
            link.kill()
            (again,) = await devices.join("draft", model_info())
            again.kill()
            await until(lambda: only.worker.num_engines == 0)

        run(main())


def test_an_engine_that_is_asked_to_move_loses_nothing_and_drafts_on_the_other_device(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check also that it stays where it is as long as the other device admits none."""
    monkeypatch.setattr(pool_worker, "EXAMINE_ENGINE_S", 0.01)
    refusals = [WorkerLost("the device has no room")]

    with pool_of(models) as old, pool_of(models) as new:
        engine = PooledEngine(models, 0)

        async def join(joining: JoiningEngine) -> AsyncGenerator[WorkerReady]:
            device = new if old.worker.num_engines else old
            if device is new and refusals:
                raise refusals.pop()
            async with aclosing(device.join(joining)) as members:
                async for ready in members:
                    yield ready

        async def main() -> None:
            await engine.connect(SimpleNamespace(join=join))
            await engine.run(lambda: old.worker.num_rounds < 3)
            old.worker.ask_to_move(old.worker.engines)
            await until(lambda: not refusals)
            assert (old.worker.num_engines, new.worker.num_engines) == (1, 0)
            before = old.worker.num_rounds
            await engine.run(lambda: old.worker.num_rounds < before + 2)
            assert engine.coordinator.has_work
            old.worker.ask_to_move(old.worker.engines)
            await until(lambda: new.worker.num_engines == 1)
            await engine.run(lambda: old.worker.num_engines > 0)
            assert engine.coordinator.has_work, "it has moved under load"
            await engine.run()
            assert new.worker.num_rounds, "the other device has drafted"
            (supervisor,) = engine.supervisors
            assert (supervisor.num_restarts, supervisor.last_loss) == (0, None)
            await engine.close()
            await until(lambda: new.worker.num_engines == 0)

        run(main())
        assert engine.texts == models.texts[0]


def test_engines_of_a_device_that_is_removed_join_the_other_one(models: Models) -> None:
    with pool_of(models) as removed, pool_of(models) as left:
        engine = PooledEngine(models, 0)
        devices = [removed]

        async def join(joining: JoiningEngine) -> AsyncGenerator[WorkerReady]:
            async with aclosing(devices[0].join(joining)) as members:
                async for ready in members:
                    yield ready

        async def main() -> None:
            await engine.connect(SimpleNamespace(join=join))
            await engine.run(lambda: removed.worker.num_rounds < 3)
            devices[0] = left
            await asyncio.to_thread(removed.stop)
            await until(lambda: left.worker.num_engines == 1 and engine.has_restarted(1))
            await engine.run()
            assert left.worker.num_rounds
            await engine.close()

        run(main())
        assert engine.texts == models.texts[0]


def test_an_engine_whose_target_has_another_vocabulary_is_refused_with_the_remedy(
    models: Models,
) -> None:
    with pool_of(models) as pool:
        pool.worker.join(b"a" * 40, model_info())
        with pytest.raises(ConfigError, match=r"give each its own draft\.pool\.name"):
            pool.worker.join(b"b" * 40, replace(model_info(), vocab_size=7))
        assert pool.worker.num_engines == 1


class FailingModel:
    """A model that says once that it cannot, and then drafts nothing."""

    def __init__(self) -> None:
        self.errors: list[Exception] = [OutOfPages("no room")]

    def draft(self, steps: Sequence[DraftStep], should_stop: Callable[[], bool]) -> list[Proposal]:
        if self.errors:
            raise self.errors.pop()
        return [Proposal(step.seq_id, step.stop, (), None, step.stop) for step in steps]

    def release(self, seq_ids: Sequence[int]) -> None: ...


class FailingDrafter(OpenDrafter):
    num_pages = 100

    def __init__(self) -> None:
        model: Any = FailingModel()
        super().__init__(model, context=100, fanout=None)


def test_links_keep_engines_apart_and_one_that_left_gets_no_answer() -> None:
    worker = PoolWorker(lambda info: FailingDrafter(), HOST, page_size=16, max_places=8)
    thread = threading.Thread(target=worker.run)
    thread.start()

    async def main() -> None:
        keys = [KeyPair.generate() for _ in range(3)]
        numbers = [worker.join(each.public, model_info()) for each in keys[:2]]
        clients = [Client(each, worker.address) for each in keys]
        propose = Propose(1, 10.0, (DraftStep(0, 0, (1,), 1, Policy(Warp(), "block", 1, 1)),))
        with pytest.raises(OutOfPages, match="no room"):
            await clients[0].call(propose, PATIENCE_S)
        answers = await asyncio.gather(
            clients[0].call(replace(propose, number=2), PATIENCE_S),
            clients[1].call(propose, PATIENCE_S),
        )
        assert [isinstance(each, Proposals) and each.number for each in answers] == [2, 1]
        worker.leave(numbers[1])
        for silenced in clients[1:]:
            with pytest.raises(WorkerLost):
                await silenced.call(replace(propose, number=3), 0.3)
        assert isinstance(await clients[0].call(replace(propose, number=3), 10.0), Proposals)
        for client in clients:
            client.close()

    try:
        run(main())
    finally:
        worker.stop()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_an_engine_that_died_loses_its_membership_though_it_said_nothing(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_worker, "EXAMINE_ENGINE_S", 0.01)
    states = [True, True, False]

    async def is_running() -> bool | None:
        return states.pop(0)

    async def main(worker: PoolWorker) -> None:
        members = worker.membership(b"a" * 40, model_info(), is_running)
        assert len([opened async for opened in members]) == 1
        assert not states
        assert worker.num_engines == 0

    with pool_of(models) as pool:
        run(main(pool.worker))
