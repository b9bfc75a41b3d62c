"""All replicas of a deployment: where a request goes, and how their number follows the load. As Ray Serve does it, without Ray."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from specserve.errors import Overloaded
from specserve.tools.simulate.autoscaling import Autoscaler
from specserve.tools.simulate.load import Arrival
from specserve.tools.simulate.replica import Replica
from specserve.tools.simulate.scenario import Scenario
from specserve.tools.simulate.statistics import Asked, Tally

PERIOD_S = 1.0  # between two looks at the load

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Fleet:
    """Of two replicas drawn at random, a request goes to the less busy one. Its tasks are begun by `spawn`, and end once it has ended."""

    def __init__(self, scenario: Scenario, tally: Tally, spawn: Spawn) -> None:
        self.replicas: list[Replica] = []  # all that ever were
        self.most = 0
        self.device_seconds = 0.0
        self._scenario, self._tally, self._spawn = scenario, tally, spawn
        self._rules = scenario.config.replicas
        self._dice = random.Random(scenario.seed)
        self._serving: list[Replica] = []  # may get requests, once they are ready
        self._homeless: list[asyncio.Future[None]] = []  # requests that wait for any replica
        self._ended = False
        for _ in range(self._rules.min):
            self._add(startup_s=0.0)
        if self._rules.min < self._rules.max:
            spawn(self._scale())

    def end(self) -> None:
        """Nothing may be under way. Raises what went wrong in a drafter, without which an engine would have gone on."""
        self._ended = True
        for replica in self.replicas:
            if not replica.ended:
                self._give_back(replica)
            if replica.drafter is not None and replica.drafter.failure is not None:
                raise replica.drafter.failure

    async def serve(self, arrival: Arrival) -> Asked:
        """One request, until it is answered or refused."""
        asked = Asked(at=asyncio.get_running_loop().time())
        while not (ready := [replica for replica in self._serving if replica.ready]):
            self._homeless.append(asyncio.get_running_loop().create_future())
            await self._homeless[-1]
        replica = min(self._dice.sample(ready, min(2, len(ready))), key=lambda one: one.ongoing)
        try:
            await replica.answer(arrival, asked)
        except Overloaded:
            asked.refused = True
        if replica not in self._serving and not replica.ongoing and not replica.ended:
            self._give_back(replica)
        return asked

    async def _scale(self) -> None:
        scaler, loop = Autoscaler(self._rules), asyncio.get_running_loop()
        while not self._ended:
            ongoing = sum(replica.ongoing for replica in self.replicas) + len(self._homeless)
            wanted = scaler.decide(loop.time(), current=len(self._serving), ongoing=ongoing)
            for _ in range(wanted - len(self._serving)):
                self._add(startup_s=self._scenario.startup_s)
            for _ in range(len(self._serving) - wanted):
                self._drain()
            await asyncio.sleep(PERIOD_S)

    def _add(self, *, startup_s: float) -> None:
        replica = Replica(self._scenario, len(self.replicas), self._tally)
        self.replicas.append(replica)
        self._serving.append(replica)
        self.most = max(self.most, len(self._serving))
        self._spawn(self._run(replica, startup_s))

    async def _run(self, replica: Replica, startup_s: float) -> None:
        if startup_s:
            await asyncio.sleep(startup_s)
        if replica.ended:
            return
        replica.ready = True
        homeless, self._homeless = self._homeless, []
        for waiter in homeless:
            waiter.set_result(None)
        await replica.coordinator.run()

    def _drain(self) -> None:
        """One that is not ready yet goes first, then the least busy. It gets no more requests, and ends with its last one."""
        replica = min(self._serving, key=lambda one: (one.ready, one.ongoing))
        self._serving.remove(replica)
        if not replica.ongoing:
            self._give_back(replica)

    def _give_back(self, replica: Replica) -> None:
        replica.end()
        self.device_seconds += (
            asyncio.get_running_loop().time() - replica.begun
        ) * self._scenario.num_devices
