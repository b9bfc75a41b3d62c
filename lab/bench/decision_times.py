"""Time that the scheduler itself takes for a decision, by the number of engines.

The code is the real one: the router in Serve's own request loop, the autoscaling policies, the
merging of a draft pool, the coordinator's round, the planner. Engines are names and queue lengths.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest

from lab.bench.coordinator_overhead import measure as measure_rounds
from lab.simulate.deployment import ScalingContext
from specserve.cluster.board import autoscaling
from specserve.cluster.gateway.prefix_affinity import EngineState, PrefixAffinity
from specserve.cluster.gateway.request_router import CACHED_TOKENS, PrefixRequestRouter
from specserve.drafters.drafting_round import DraftingRound
from specserve.features.draft_pools.drafter import EngineRound, PooledDrafter
from specserve.features.draft_pools.rounds import DraftingRounds
from specserve.features.draft_pools.shares import CacheShares
from specserve.tools.plan.gains import GammaAdvice, ModelPair
from specserve.tools.plan.pools import pool_advice
from specserve.types import DraftStep, Policy, PreparedProposal, Proposal, Request, Warp

PROMPT = 1024
SHARED = 256
"""First tokens that all prompts of a group have in common."""
GROUPS = 16
ONGOING = 8
"""Requests under way for each engine."""
CACHED = 1 << 18
MAX_ONGOING = 128
SEQUENCES = 8
"""Sequences of an engine that drafts in a pool."""
HEAD = (
    "| decision | engines | p50, us | p99, us | n |",
    "|---|---|---|---|---|",
)


@dataclass(frozen=True, slots=True)
class DecisionTimes:
    """Seconds of many equal decisions."""

    name: str
    engines: int
    seconds: Sequence[float]

    def row(self) -> str:
        ordered = sorted(self.seconds)
        p50, p99 = (1e6 * ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
        return f"| {self.name} | {self.engines:,} | {p50:,.0f} | {p99:,.0f} | {len(ordered):,} |"


@dataclass
class Replica:
    """The part of Serve's running replica that a router reads."""

    replica_id: ReplicaID
    max_ongoing_requests: int = MAX_ONGOING
    routing_stats: dict[str, int] = field(default_factory=lambda: {CACHED_TOKENS: CACHED})

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return ONGOING


def measure_all(engines: Sequence[int], *, repeats: int) -> Iterator[DecisionTimes]:
    """Yield the times of every decision."""
    for number in engines:
        yield from asyncio.run(_router(number, repeats))
    for number in engines:
        yield _comparison_of_all(number, max(5, repeats // 50))
    for number in engines:
        for policy in (autoscaling.policy, autoscaling.first_token_policy):
            yield _policy(policy, number, max(5, repeats // 20))
    for number in (2, 8, 32):
        yield _pool_round(number, repeats)
    rounds = max(12, repeats // 4)
    for running in (8, 32, 128):
        overhead = measure_rounds(running, gamma=None, rounds=rounds)
        name = f"coordinator, a round of {running} sequences (median only)"
        yield DecisionTimes(name, 1, [overhead.ms_per_round / 1e3] * rounds)
    yield _plan(max(5, repeats // 20))


async def _router(engines: int, repeats: int) -> list[DecisionTimes]:
    """Time requests of a router that knows ONGOING others on each engine, and its updates."""
    deployment = DeploymentID("Engine", "app")
    router = PrefixRequestRouter(  # type: ignore[no-untyped-call]
        deployment, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    router.initialize_state(max_running=MAX_ONGOING)
    # Serve logs every change of replicas.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    replicas: list[Any] = [
        Replica(ReplicaID(f"{number:08x}", deployment)) for number in range(engines)
    ]
    router.update_replicas(replicas)
    await asyncio.sleep(0.01)
    rng, taken, under_way = random.Random(0), list[float](), list[tuple[ReplicaID, str]]()
    for number in range(repeats + ONGOING * engines):
        pending = _pending(rng, number)
        start = time.perf_counter()
        replica = await router._choose_replica_for_request(pending)
        router.on_send_request(replica.replica_id)
        router.on_request_routed(pending, replica.replica_id, None)
        seconds = time.perf_counter() - start
        under_way.append((replica.replica_id, pending.metadata.internal_request_id))
        if len(under_way) > ONGOING * engines:
            place = rng.randrange(len(under_way))
            under_way[place], under_way[-1] = under_way[-1], under_way[place]
            done, call = under_way.pop()
            start = time.perf_counter()
            router.on_request_completed(done, call)
            router.decrement_queue_len_cache(done)
            taken.append(seconds + time.perf_counter() - start)
    updates = []
    for _ in range(max(5, repeats // 50)):
        start = time.perf_counter()
        router.update_replicas(replicas)
        updates.append(time.perf_counter() - start)
        await asyncio.sleep(0)
    return [
        DecisionTimes("router, a request, with Serve's part", engines, taken),
        DecisionTimes("router, an update of the replicas", engines, updates),
    ]


def _prompt(rng: random.Random) -> tuple[int, ...]:
    group = rng.randrange(GROUPS)
    shared = tuple(range(group, group + SHARED))
    return shared + tuple(rng.choices(range(100_000), k=PROMPT - SHARED))


def _pending(rng: random.Random, number: int) -> PendingRequest:
    return PendingRequest(
        args=[Request(_prompt(rng), 8, Warp(), seed=1)],
        kwargs={},
        metadata=RequestMetadata(request_id=f"r{number}", internal_request_id=f"i{number}"),
    )


def _comparison_of_all(engines: int, repeats: int) -> DecisionTimes:
    """Time what a choice would take if every engine were compared."""
    affinity, rng, taken = PrefixAffinity(), random.Random(0), []
    states = {f"engine-{number}": EngineState(ONGOING, MAX_ONGOING) for number in range(engines)}
    affinity.keep(states)
    for _ in range(repeats):
        prompt = _prompt(rng)
        start = time.perf_counter()
        affinity.rank(prompt, b"", states)
        taken.append(time.perf_counter() - start)
    return DecisionTimes("for comparison: ranking all engines", engines, taken)


def _policy(policy: Any, engines: int, repeats: int) -> DecisionTimes:
    rng = random.Random(0)
    names = {
        autoscaling.PAGES_METRIC: 0.6,
        autoscaling.LIMIT_METRIC: 24.0,
        autoscaling.HIGHEST_METRIC: 20.0,
        autoscaling.START_METRIC: 60.0,
    }
    readings = {
        name: {one: value * rng.uniform(0.9, 1.1) for one in range(engines)}
        for name, value in names.items()
    }
    raw = {
        name: {one: [SimpleNamespace(value=value)] for one, value in by.items()}
        for name, by in readings.items()
    }
    state: Mapping[str, Any] = {}
    taken = []
    for number in range(repeats):
        context = ScalingContext(
            target_num_replicas=engines,
            total_num_requests=ONGOING * engines,
            current_time=float(number),
            config=SimpleNamespace(get_target_ongoing_requests=lambda: 2 * ONGOING),
            raw_metrics=raw,
            aggregated_metrics={autoscaling.PAGES_METRIC: readings[autoscaling.PAGES_METRIC]},
            policy_state=state,
        )
        start = time.perf_counter()
        _, state = policy(context)
        taken.append(time.perf_counter() - start)
    return DecisionTimes(f"autoscaling, `{policy.__name__}`", engines, taken)


class RepeatingDrafter:
    """A drafter below a pool that proposes the same tokens in no time."""

    def __init__(self) -> None:
        self._rounds = DraftingRounds(self, clock=lambda: 0.0)

    def begin(self, engine: int, steps: Sequence[DraftStep], deadline: float) -> DraftingRound:
        return self._rounds.begin(steps, deadline)

    def advance(self, should_stop: Callable[[], bool]) -> Sequence[DraftingRound]:
        return self._rounds.advance(should_stop)[0]

    def draft(
        self, steps: Sequence[DraftStep], should_stop: Callable[[], bool]
    ) -> Sequence[Proposal]:
        return [Proposal(one.seq_id, one.stop, (3,) * one.gamma, None, one.stop) for one in steps]

    def release(self, seq_ids: Sequence[int]) -> None: ...

    def remove_engine(self, engine: int) -> None: ...

    def prepared_proposals(self, engine: int) -> tuple[PreparedProposal, ...]:
        return ()


def _pool_round(engines: int, repeats: int) -> DecisionTimes:
    """Time the merging of a round of all engines that share a device, its drafter included."""
    shares = CacheShares(10**6, 16)
    pooled = PooledDrafter(RepeatingDrafter(), shares, max_places=128)
    taken = []
    for number in range(repeats):
        length = PROMPT + 4 * number
        rounds = [
            EngineRound(
                engine,
                tuple(
                    DraftStep(
                        seq_id, length, (7,), gamma=4, policy=Policy(Warp(), "block", 1, PROMPT)
                    )
                    for seq_id in range(SEQUENCES)
                ),
                (),
                deadline=1.0,
            )
            for engine in range(1, engines + 1)
        ]
        start = time.perf_counter()
        pooled.propose(rounds)
        taken.append(time.perf_counter() - start)
    name = f"draft pool, a batch of rounds of {SEQUENCES} sequences an engine of one device"
    return DecisionTimes(name, engines, taken)


def _plan(repeats: int) -> DecisionTimes:
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        pair = ModelPair("given", 0.75, 0.07, 0.02)
        pool_advice([GammaAdvice.from_pair(pair, hit_rate=0.8, max_gamma=16)])
        taken.append(time.perf_counter() - start)
    return DecisionTimes("planner, gamma and engines of a pool", 1, taken)
