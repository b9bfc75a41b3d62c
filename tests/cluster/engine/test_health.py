"""An unhealthy engine replica must say why, and be replaced by Serve if it cannot recover."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from specserve.cluster.board.status_board import ENGINE, Board, ReplicaReport
from specserve.cluster.engine.device_failures import DeviceId
from specserve.cluster.engine.group import TARGET
from specserve.cluster.engine.health import ROUND_SLACK_S, EngineHealth
from specserve.cluster.engine.node_drain import DrainWatch
from specserve.engine import Coordinator
from specserve.errors import OutOfPages, WorkerLost
from specserve.metrics import Registry
from specserve.types import Chunk, Request, Verdict, VerifyStep, Warp
from tests.support.clock import Clock
from tests.support.fakes import FakeTarget, model_info, open_coordinator

DEADLINE_S = 10.0


@dataclass
class Group:
    """Workers without processes."""

    is_lost: bool = False
    troubles: dict[str, str] = field(default_factory=dict)
    avoided_devices: dict[DeviceId, tuple[str, ...]] = field(default_factory=dict)


class Replica:
    """A coordinator that runs, and its health."""

    def __init__(self) -> None:
        self.clock, self.group, self.info = Clock(), Group(), model_info()
        self.target = FakeTarget(self.info)
        self.emitted: list[Chunk] = []
        self.coordinator: Coordinator = open_coordinator(
            self.target, None, info=self.info, emit=self.emitted.extend, clock=self.clock
        )
        self.rounds = asyncio.ensure_future(self.coordinator.run())
        self.drain = DrainWatch(dict, "here", nodes=tuple)
        group: Any = self.group
        self.health = EngineHealth(
            self.coordinator,
            group,
            self.rounds,
            round_deadline_s=DEADLINE_S,
            drain=self.drain,
            clock=self.clock,
        )

    def submit(self, count: int = 2) -> None:
        for i in range(count):
            self.coordinator.submit(Request((i, 2, 3), 1000, Warp(), seed=1))


def play(scene: Callable[[Replica], Awaitable[None]]) -> None:
    """Play a scene with a replica, and end its coordinator."""

    async def main() -> None:
        replica = Replica()
        await asyncio.wait_for(scene(replica), 10)
        replica.rounds.cancel()
        await asyncio.gather(replica.rounds, return_exceptions=True)

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_a_replica_is_healthy_while_it_serves_and_while_it_has_nothing_to_do() -> None:
    async def scene(replica: Replica) -> None:
        replica.health.check()
        replica.submit()
        await until(lambda: len(replica.emitted) > 20)
        replica.health.check()
        assert replica.health.trouble is None

    play(scene)


def test_three_rounds_without_progress_are_the_end_of_a_replica_and_health_says_why() -> None:
    async def scene(replica: Replica) -> None:
        replica.submit()
        await until(lambda: len(replica.emitted) > 4)
        before = len(replica.target.rounds)
        replica.target.errors += [OutOfPages("no page is free")] * 99
        await until(replica.rounds.done)
        with pytest.raises(WorkerLost, match="no progress in 3 rounds: no page is free"):
            replica.health.check()
        assert len(replica.target.rounds) - before == 3
        board = Board()
        board.report(ReplicaReport("r", ENGINE, replica.health.trouble, Registry().snapshot()))
        status = board.status()
        assert (status.healthy, status.why) == (
            False,
            "no progress in 3 rounds: no page is free",
        )

    play(scene)


def test_a_coordinator_that_has_ended_is_the_end_of_its_replica() -> None:
    async def scene(replica: Replica) -> None:
        replica.rounds.cancel()
        await until(replica.rounds.done)
        with pytest.raises(WorkerLost, match="the coordinator has ended: cancelled"):
            replica.health.check()

    play(scene)


def test_a_round_that_does_not_end_is_the_end_of_a_replica_unless_its_target_restarts() -> None:
    async def scene(replica: Replica) -> None:
        begun = asyncio.Event()

        async def stuck(steps: Sequence[VerifyStep]) -> list[Verdict]:
            begun.set()
            await asyncio.Event().wait()
            return []

        replica.target.verify = stuck  # type: ignore[method-assign]
        replica.submit()
        await begun.wait()
        replica.clock.now += 2 * DEADLINE_S + ROUND_SLACK_S
        replica.health.check()
        replica.clock.now += 0.1
        with pytest.raises(WorkerLost, match="a round does not end"):
            replica.health.check()
        replica.group.troubles[TARGET] = "the target is being restarted: killed"
        replica.health.check()
        assert replica.health.trouble == "the target is being restarted: killed"

    play(scene)


def test_a_target_that_will_not_be_restarted_is_the_end_of_its_replica() -> None:
    async def scene(replica: Replica) -> None:
        replica.group.troubles[TARGET] = "the target cannot be restarted (4 tries): no GPU"
        replica.health.check()
        replica.group.is_lost = True
        with pytest.raises(WorkerLost, match="cannot be restarted"):
            replica.health.check()

    play(scene)


def test_a_draft_that_is_restarted_is_no_trouble() -> None:
    async def scene(replica: Replica) -> None:
        replica.group.troubles["draft"] = "the draft is being restarted: killed"
        replica.health.check()
        assert replica.health.trouble is None

    play(scene)


def test_a_replica_that_is_about_to_lose_a_rank_is_replaced_while_it_still_serves() -> None:
    async def scene(replica: Replica) -> None:
        replica.submit()
        replica.drain.trouble = "the node of target-1 is being drained"
        with pytest.raises(WorkerLost, match="is being drained"):
            replica.health.check()
        before = len(replica.emitted)
        await until(lambda: len(replica.emitted) > before + 20)

    play(scene)


def test_devices_that_are_avoided_are_named_and_make_no_engine_unhealthy() -> None:
    async def scene(replica: Replica) -> None:
        assert not replica.health.device_troubles
        replica.group.avoided_devices = {
            DeviceId("a1", "GPU 3"): (),
            DeviceId("b2", "cpu"): ("target-0", "draft"),
        }
        troubles = replica.health.device_troubles
        assert troubles == (
            "GPU 3 of node a1 has failed and is avoided",
            "cpu of node b2 has failed and is avoided, though target-0 and draft must use it",
        )
        assert replica.health.trouble is None
        board = Board()
        for name in ("r", "s"):
            snapshot = Registry().snapshot()
            report = ReplicaReport(
                name, ENGINE, None, snapshot, device_troubles=troubles, losses=("draft: killed",)
            )
            board.report(report)
        status = board.status()
        assert status.healthy
        assert status.device_troubles == troubles
        assert status.troubles == troubles
        assert status.losses == ("draft: killed",), "one reason of two engines stands there once"

    play(scene)
