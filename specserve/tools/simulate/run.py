"""`simulate`: plays a scenario from its first request to its last answer, and says what came of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specserve.tools.simulate import clock
from specserve.tools.simulate.deployment import Fleet
from specserve.tools.simulate.load import Arrival
from specserve.tools.simulate.scenario import Scenario
from specserve.tools.simulate.statistics import Asked, Tally


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles | None:
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(*(ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class Result:
    """Of the whole run; what is said of rounds is of those that only decode, and means over them."""

    finished: int  # requests
    refused: int
    failed: int
    seconds: float  # from the first arrival to the last token
    tokens: int
    tokens_per_second: float
    rounds: int
    round_seconds: float
    verify_seconds: float  # links and the host's work included
    round_sequences: float
    tokens_per_round: float  # of one sequence
    mean_accepted: float  # draft tokens of a proposal
    accepted_share: float  # of all draft tokens
    hit_rate: (
        float | None
    )  # proposals that were prepared before the verdict they follow; None: nothing was prepared
    target_busy: float  # share of the replicas' time
    draft_busy: float
    time_to_first: Quantiles | None
    time_per_token: Quantiles | None
    replicas: int  # the most at a time
    device_seconds: float


def simulate(scenario: Scenario) -> Result:
    """Everything that is random follows from the scenario's seed: the same scenario gives the same result."""
    assert scenario.arrivals, "somebody must ask for something"
    return clock.run(_play(scenario))


async def _play(scenario: Scenario) -> Result:
    tally, loop = Tally(), asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        fleet = Fleet(scenario, tally, group.create_task)
        asked = await (
            _open_loop(fleet, scenario.arrivals)
            if scenario.concurrency is None
            else _closed_loop(fleet, scenario)
        )
        seconds = loop.time()
        fleet.end()
    return _result(asked, tally, fleet, num_devices=scenario.num_devices, seconds=seconds)


async def _open_loop(fleet: Fleet, arrivals: Sequence[Arrival]) -> list[Asked]:
    loop, under_way = asyncio.get_running_loop(), []
    for arrival in arrivals:
        await asyncio.sleep(arrival.time - arrivals[0].time - loop.time())
        under_way.append(asyncio.create_task(fleet.serve(arrival)))
    return list(await asyncio.gather(*under_way))


async def _closed_loop(fleet: Fleet, scenario: Scenario) -> list[Asked]:
    assert scenario.concurrency is not None
    left = iter(scenario.arrivals)
    answered = await asyncio.gather(*(_client(fleet, left) for _ in range(scenario.concurrency)))
    return [asked for of_client in answered for asked in of_client]


async def _client(fleet: Fleet, left: Iterator[Arrival]) -> list[Asked]:
    return [await fleet.serve(arrival) for arrival in left]


def _result(
    asked: Sequence[Asked], tally: Tally, fleet: Fleet, *, num_devices: int, seconds: float
) -> Result:
    replicas, targets = fleet.replicas, [replica.target for replica in fleet.replicas]
    accepted = sum(target.num_accepted for target in targets)
    lifetime = fleet.device_seconds / num_devices
    ahead = [replica.anticipation for replica in replicas if replica.anticipation is not None]
    hits, tried = (
        sum(one.num_hits for one in ahead),
        sum(one.num_hits + one.num_misses for one in ahead),
    )
    tokens = sum(one.num_tokens for one in asked)
    return Result(
        finished=sum(not one.refused and one.failed is None for one in asked),
        refused=sum(one.refused for one in asked),
        failed=sum(one.failed is not None for one in asked),
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=_share(tokens, seconds),
        rounds=tally.rounds,
        round_seconds=_share(tally.seconds, tally.rounds),
        verify_seconds=_share(tally.verify_seconds, tally.rounds),
        round_sequences=_share(tally.sequences, tally.rounds),
        tokens_per_round=_share(tally.committed, tally.sequences),
        mean_accepted=_share(accepted, sum(target.num_proposals for target in targets)),
        accepted_share=_share(accepted, sum(target.num_drafted for target in targets)),
        hit_rate=hits / tried if tried else None,
        target_busy=_share(sum(target.busy for target in targets), lifetime),
        draft_busy=_share(sum(replica.clock.busy for replica in replicas), lifetime),
        time_to_first=Quantiles.of(
            [one.seconds_to_first for one in asked if one.seconds_to_first is not None]
        ),
        time_per_token=Quantiles.of(
            [one.seconds_per_token for one in asked if one.seconds_per_token is not None]
        ),
        replicas=fleet.most,
        device_seconds=fleet.device_seconds,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
