"""All replicas of a deployment: routing and autoscaling by the rules of Ray Serve, without Ray."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from lab.simulate.clock import DeviceClock
from lab.simulate.load import Arrival
from lab.simulate.pool import SimulatedPool
from lab.simulate.replica import SimulatedReplica
from lab.simulate.scenario import Mode, Scenario
from lab.simulate.statistics import RequestTimes, RoundTotals
from specserve.cluster.board.autoscaling import PAGES_METRIC, first_token_policy, policy
from specserve.config.sections import ReplicasConfig
from specserve.errors import Overloaded

SCALING_PERIOD_S = 1.0
LOOK_BACK_S = 30.0
_TOLERANCE_S = 1e-6  # for sums of floats

StartTask = Callable[[Coroutine[Any, Any, None]], object]


@dataclass(frozen=True, slots=True)
class ScalingContext:
    """The part of a `ray.serve.config.AutoscalingContext` that the policies read."""

    target_num_replicas: int
    total_num_requests: float
    current_time: float
    config: Any
    raw_metrics: Mapping[str, Mapping[int, Sequence[Any]]] = field(default_factory=dict)
    aggregated_metrics: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    policy_state: Mapping[str, Any] = field(default_factory=dict)


class Autoscaler:
    """The number of replicas, decided by the policy that Serve would call.

    A change is made once it has been wanted without a break for the delay of its direction.
    """

    def __init__(self, rules: ReplicasConfig) -> None:
        self._rules = rules
        # The same as in cluster/app.py.
        self._look_back = max(1.0, min(LOOK_BACK_S, rules.upscale_delay_s, rules.downscale_delay_s))
        self._policy = policy if rules.target_ttft_s is None else first_token_policy
        self._policy_state: Mapping[str, Any] = {}
        target = rules.target_ongoing_requests
        self._config = SimpleNamespace(get_target_ongoing_requests=lambda: target)
        self._seen: deque[tuple[float, int]] = deque()
        self._direction = 0  # of the wanted change
        self._since = 0.0

    def decide(
        self,
        now: float,
        *,
        current: int,
        ongoing: int,
        stats: Sequence[Mapping[str, float]] = (),
    ) -> int:
        """Return the number of replicas from now on.

        `ongoing` counts all requests, including those that wait for a replica; `stats` are what
        each replica reports.
        """
        wanted = self._wanted(now, current, ongoing, stats)
        direction = (wanted > current) - (wanted < current)
        if direction != self._direction:
            self._direction, self._since = direction, now
        delay = self._rules.upscale_delay_s if direction > 0 else self._rules.downscale_delay_s
        if not direction or now - self._since + _TOLERANCE_S < delay:
            return current
        self._direction = 0
        # The last replica is removed in a step of its own.
        return wanted if direction > 0 or current == 1 else max(1, wanted)

    def _wanted(
        self, now: float, current: int, ongoing: int, stats: Sequence[Mapping[str, float]]
    ) -> int:
        self._seen.append((now, ongoing))
        while self._seen[0][0] < now - self._look_back:
            self._seen.popleft()
        mean = sum(count for _, count in self._seen) / len(self._seen)
        metrics: dict[str, dict[int, float]] = {}
        for replica, reported in enumerate(stats):
            for name, value in reported.items():
                metrics.setdefault(name, {})[replica] = value
        wanted, self._policy_state = self._policy(
            ScalingContext(
                target_num_replicas=current,
                total_num_requests=mean,
                current_time=now,
                config=self._config,
                raw_metrics={
                    name: {replica: [SimpleNamespace(value=value)] for replica, value in by.items()}
                    for name, by in metrics.items()
                },
                aggregated_metrics={PAGES_METRIC: metrics.get(PAGES_METRIC, {})},
                policy_state=self._policy_state,
            )
        )
        return max(self._rules.min, min(self._rules.max, math.ceil(wanted)))


class SimulatedDeployment:
    """Replicas behind a router that sends a request to the less busy of two random ones.

    Its tasks are started by `start_task`, and end once it has ended.
    """

    def __init__(
        self, scenario: Scenario, round_totals: RoundTotals, start_task: StartTask
    ) -> None:
        self.replicas: list[SimulatedReplica] = []  # including those that have ended
        self.most = 0
        self.requests: list[RequestTimes] = []  # begun
        # Numbers of replicas that serve or start, each with the time from which it holds.
        self.replica_counts: list[tuple[float, int]] = [(0.0, scenario.config.replicas.min)]
        self.device_seconds = 0.0
        self._scenario, self._round_totals, self._start_task = scenario, round_totals, start_task
        self._rules = scenario.config.replicas
        self._rng = random.Random(scenario.seed)
        num_drafts = scenario.config.draft.pool.devices if scenario.mode is Mode.POOLED else 0
        self.pools = tuple(SimulatedPool(scenario) for _ in range(num_drafts))
        self._serving: list[SimulatedReplica] = []  # get requests once they are ready
        self._waiting: list[asyncio.Future[None]] = []  # requests while no replica is ready
        self._ended = False
        for _ in range(self._rules.min):
            self._add(startup_s=0.0)
        if self._rules.min < self._rules.max:
            start_task(self._scale())

    @property
    def draft_clocks(self) -> list[DeviceClock]:
        """Clocks of the devices that draft: the pools' clocks, or one of each replica."""
        owners = self.pools or self.replicas
        return [owner.clock for owner in owners]

    def end(self) -> None:
        """End all replicas. No request may be under way.

        Raises the exception of a drafter that failed, without which an engine would have gone on.
        """
        self._ended = True
        for replica in self.replicas:
            if not replica.ended:
                self._end_replica(replica)
            if replica.drafter is not None and replica.drafter.failure is not None:
                raise replica.drafter.failure

    async def serve(self, arrival: Arrival) -> RequestTimes:
        """Serve one request until it is answered or refused."""
        times = RequestTimes(sent=asyncio.get_running_loop().time())
        self.requests.append(times)
        while not (ready := [replica for replica in self._serving if replica.ready]):
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]
        replica = min(self._rng.sample(ready, min(2, len(ready))), key=lambda one: one.ongoing)
        try:
            await replica.answer(arrival, times)
        except Overloaded:
            times.refused = True
        if replica not in self._serving and not replica.ongoing and not replica.ended:
            self._end_replica(replica)
        return times

    async def _scale(self) -> None:
        scaler, loop = Autoscaler(self._rules), asyncio.get_running_loop()
        schedule = iter(self._scenario.schedule or ())
        while not self._ended:
            wanted = (
                self._decide(scaler, loop.time())
                if self._scenario.schedule is None
                else next(schedule, len(self._serving))
            )
            if wanted != len(self._serving):
                self.replica_counts.append((loop.time(), wanted))
            for _ in range(wanted - len(self._serving)):
                self._add(startup_s=self._scenario.startup_s)
            for _ in range(len(self._serving) - wanted):
                self._drain()
            await asyncio.sleep(SCALING_PERIOD_S)

    def _decide(self, scaler: Autoscaler, now: float) -> int:
        ongoing = sum(replica.ongoing for replica in self.replicas) + len(self._waiting)
        stats = [replica.autoscaling_stats() for replica in self._serving if replica.ready]
        return scaler.decide(now, current=len(self._serving), ongoing=ongoing, stats=stats)

    def _add(self, *, startup_s: float) -> None:
        number = len(self.replicas)
        pool = self.pools[number % len(self.pools)] if self.pools else None
        replica = SimulatedReplica(self._scenario, number, self._round_totals, pool)
        self.replicas.append(replica)
        self._serving.append(replica)
        self.most = max(self.most, len(self._serving))
        self._start_task(self._run(replica, startup_s))

    async def _run(self, replica: SimulatedReplica, startup_s: float) -> None:
        if startup_s:
            await asyncio.sleep(startup_s)
        if replica.ended:
            return
        replica.ready = True
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            request.set_result(None)
        await replica.coordinator.run()

    def _drain(self) -> None:
        """Remove a replica: one that is not ready yet, else the least busy.

        It gets no more requests, and ends with its last one.
        """
        replica = min(self._serving, key=lambda one: (one.ready, one.ongoing))
        self._serving.remove(replica)
        if not replica.ongoing:
            self._end_replica(replica)

    def _end_replica(self, replica: SimulatedReplica) -> None:
        replica.end()
        lifetime = asyncio.get_running_loop().time() - replica.started
        self.device_seconds += lifetime * self._scenario.num_devices
