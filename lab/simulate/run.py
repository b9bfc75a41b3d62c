"""`simulate`: run a scenario from its first request to its last answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lab.simulate import clock
from lab.simulate.deployment import SimulatedDeployment
from lab.simulate.load import Arrival
from lab.simulate.period import PeriodResult, measure_period
from lab.simulate.scenario import Scenario
from lab.simulate.statistics import Quantiles, RequestTimes, RoundTotals


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Figures of a run. Figures of rounds are means over the rounds without a prefill."""

    finished: int  # requests
    refused: int
    failed: int
    seconds: float  # from the first arrival to the last token
    tokens: int
    tokens_per_second: float
    rounds: int
    round_seconds: float
    verify_seconds: float  # including links and the host's work
    round_sequences: float
    tokens_per_round: float  # per sequence
    mean_accepted: float  # draft tokens per proposal
    accepted_share: float  # accepted share of all draft tokens
    # Share of proposals that were prepared before the verdict they follow; None without any.
    hit_rate: float | None
    target_busy: float  # share of the replicas' lifetime
    draft_busy: float
    time_to_first: Quantiles | None
    time_per_token: Quantiles | None
    replicas: int  # maximum at a time
    # Numbers of replicas that serve or start, each with the time from which it holds.
    replica_counts: tuple[tuple[float, int], ...]
    device_seconds: float
    first_token_seconds: tuple[float, ...]  # of each request that got one
    period: PeriodResult | None  # figures of the scenario's period


def simulate(scenario: Scenario) -> SimulationResult:
    """Simulate a scenario. All randomness follows from its seed, so the result is repeatable."""
    assert scenario.arrivals, "a scenario has at least one request"
    return clock.run(_simulate(scenario))


async def _simulate(scenario: Scenario) -> SimulationResult:
    round_totals, loop = RoundTotals(), asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        deployment = SimulatedDeployment(scenario, round_totals, group.create_task)
        period = scenario.period and group.create_task(measure_period(deployment, *scenario.period))
        requests = await (
            _open_loop(deployment, scenario.arrivals)
            if scenario.concurrency is None
            else _closed_loop(deployment, scenario)
        )
        seconds = loop.time()
        deployment.end()
    return _result(
        requests,
        round_totals,
        deployment,
        num_devices=scenario.num_devices,
        pool_seconds=scenario.num_pool_devices * seconds,
        seconds=seconds,
        period=period.result() if period else None,
    )


async def _open_loop(
    deployment: SimulatedDeployment, arrivals: Sequence[Arrival]
) -> list[RequestTimes]:
    loop, under_way = asyncio.get_running_loop(), []
    for arrival in arrivals:
        await asyncio.sleep(arrival.time - arrivals[0].time - loop.time())
        under_way.append(asyncio.create_task(deployment.serve(arrival)))
    return list(await asyncio.gather(*under_way))


async def _closed_loop(deployment: SimulatedDeployment, scenario: Scenario) -> list[RequestTimes]:
    assert scenario.concurrency is not None
    left = iter(scenario.arrivals)
    clients = (_client(deployment, left) for _ in range(scenario.concurrency))
    answered = await asyncio.gather(*clients)
    return [times for of_client in answered for times in of_client]


async def _client(deployment: SimulatedDeployment, left: Iterator[Arrival]) -> list[RequestTimes]:
    return [await deployment.serve(arrival) for arrival in left]


def _result(
    requests: Sequence[RequestTimes],
    round_totals: RoundTotals,
    deployment: SimulatedDeployment,
    *,
    num_devices: int,
    pool_seconds: float,
    seconds: float,
    period: PeriodResult | None,
) -> SimulationResult:
    replicas, targets = deployment.replicas, [replica.target for replica in deployment.replicas]
    accepted = sum(target.num_accepted for target in targets)
    lifetime = deployment.device_seconds / num_devices
    anticipations = [
        replica.anticipation for replica in replicas if replica.anticipation is not None
    ]
    anticipations += [
        engine for pool in deployment.pools for engine in pool.anticipation.engines.values()
    ]
    draft_lifetime = lifetime if not deployment.pools else seconds * len(deployment.pools)
    num_hits = sum(one.num_hits for one in anticipations)
    num_prepared = num_hits + sum(one.num_misses for one in anticipations)
    tokens = sum(one.num_tokens for one in requests)
    first = [one.seconds_to_first for one in requests if one.seconds_to_first is not None]
    return SimulationResult(
        finished=sum(not one.refused and one.failed is None for one in requests),
        refused=sum(one.refused for one in requests),
        failed=sum(one.failed is not None for one in requests),
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=_share(tokens, seconds),
        rounds=round_totals.rounds,
        round_seconds=_share(round_totals.seconds, round_totals.rounds),
        verify_seconds=_share(round_totals.verify_seconds, round_totals.rounds),
        round_sequences=_share(round_totals.sequences, round_totals.rounds),
        tokens_per_round=_share(round_totals.committed, round_totals.sequences),
        mean_accepted=_share(accepted, sum(target.num_proposals for target in targets)),
        accepted_share=_share(accepted, sum(target.num_drafted for target in targets)),
        hit_rate=num_hits / num_prepared if num_prepared else None,
        target_busy=_share(sum(target.busy for target in targets), lifetime),
        draft_busy=_share(sum(clock.busy for clock in deployment.draft_clocks), draft_lifetime),
        time_to_first=Quantiles.from_values(first),
        time_per_token=Quantiles.from_values(
            [one.seconds_per_token for one in requests if one.seconds_per_token is not None]
        ),
        replicas=deployment.most,
        replica_counts=tuple(deployment.replica_counts),
        device_seconds=deployment.device_seconds + pool_seconds,
        first_token_seconds=tuple(first),
        period=period,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
