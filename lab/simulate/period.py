"""Figures of a part of a simulated run, in which nothing starts up and nothing runs dry."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from lab.simulate.deployment import SimulatedDeployment
from lab.simulate.statistics import Quantiles, RequestTimes


@dataclass(frozen=True, slots=True)
class PeriodResult:
    """Figures between two times. Shares are of the devices' time."""

    tokens_per_second: float
    target_busy: float  # passes of the target alone
    draft_busy: float
    draft_asked: float  # of this, passes that an engine waited for; the others prepared
    requests: tuple[RequestTimes, ...]  # sent in this time; complete once the run has ended

    @property
    def time_to_first(self) -> Quantiles | None:
        seconds = (one.seconds_to_first for one in self.requests)
        return Quantiles.from_values([one for one in seconds if one is not None])

    @property
    def time_per_token(self) -> Quantiles | None:
        seconds = (one.seconds_per_token for one in self.requests)
        return Quantiles.from_values([one for one in seconds if one is not None])


async def measure_period(
    deployment: SimulatedDeployment, start: float, stop: float
) -> PeriodResult:
    """Return the figures of a period, once it is over."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(start - loop.time())
    begun, before = len(deployment.requests), _totals(deployment)
    await asyncio.sleep(stop - loop.time())
    tokens, target, draft, asked = (
        after - earlier for after, earlier in zip(_totals(deployment), before, strict=True)
    )
    target_seconds = (stop - start) * len(deployment.replicas)
    draft_seconds = (stop - start) * len(deployment.draft_clocks)
    return PeriodResult(
        tokens / (stop - start),
        target / target_seconds,
        draft / draft_seconds,
        asked / draft_seconds,
        tuple(deployment.requests[begun:]),
    )


def _totals(deployment: SimulatedDeployment) -> tuple[float, float, float, float]:
    """Return the tokens so far, and the seconds of the target's and of the draft's passes."""
    clocks = deployment.draft_clocks
    return (
        sum(one.num_tokens for one in deployment.requests),
        sum(replica.target.busy for replica in deployment.replicas),
        sum(clock.busy for clock in clocks),
        sum(clock.asked for clock in clocks),
    )
