"""How many engines a draft can serve, by the share of a round that it drafts. Knows no models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specserve.tools.plan.gains import GammaAdvice

MAX_BUSY = 0.7
"""Share of its time that a draft of several engines may draft; above, they wait for one another."""
ENGINES = (2, 4, 8)
"""Numbers of engines for which drafts are counted."""


@dataclass(frozen=True, slots=True)
class PoolAdvice:
    """Engines that share a draft: `draft.pool.devices` for `draft.pool.targets`."""

    name: str
    gamma: int
    busy: float
    """Share of its time that a draft works for one engine, anticipation included."""
    engines: int
    """Most engines of one draft that stays below MAX_BUSY; 1 also where a single one exceeds it."""

    @classmethod
    def from_advice(cls, advice: GammaAdvice) -> PoolAdvice:
        """Estimate from pass times, as if no two engines shared a batch.

        In a round the draft prepares a proposal in gamma passes and one that forecasts, and drafts
        another in gamma passes if none of the prepared ones fits, while the target waits.
        """
        gamma, c, missed = advice.best_hidden, advice.pair.c, 1 - advice.hit_rate
        busy = c * (gamma + 1 + missed * gamma) / (1 + missed * gamma * c)
        return cls(advice.pair.name, gamma, min(1.0, busy), max(1, math.floor(MAX_BUSY / busy)))

    def devices(self, engines: int) -> int:
        """Return the drafts that a number of engines need."""
        return -(-engines // self.engines)


def pool_advice(advice: Sequence[GammaAdvice]) -> tuple[PoolAdvice, ...]:
    """Return the advice for each pair whose draft pays at all."""
    return tuple(
        PoolAdvice.from_advice(one) for one in advice if one.best_hidden and one.pair.c > 0
    )


def pool_rows(pools: Sequence[PoolAdvice]) -> Iterator[tuple[str, ...]]:
    for one in pools:
        counts = (str(one.devices(engines)) for engines in ENGINES)
        yield one.name, str(one.gamma), f"{one.busy:.0%}", str(one.engines), *counts
