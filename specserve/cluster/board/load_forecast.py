"""Forecast of a load by its level, its trend and its spread. Knows numbers and seconds alone.

Holt's linear method (Holt, 1957) for readings at uneven times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEVEL_S = 30.0
TREND_S = 120.0
DEVIATION_S = 300.0
"""Seconds after which level, trend and deviation give a reading 1/e of its first weight."""
NUM_DEVIATIONS = 2.0
"""Mean deviations that a forecast adds to what it expects."""


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """Smoothed readings of a load. It is replaced with each reading, and never changed."""

    time: float
    level: float
    trend: float = 0.0  # a second
    deviation: float = 0.0  # mean distance of readings from the level that was expected

    def observe(self, now: float, load: float) -> LoadForecast:
        """Return the forecast that includes one more reading."""
        elapsed = now - self.time
        if elapsed <= 0:
            return self
        expected = self.level + self.trend * elapsed
        error = load - expected
        level = expected + _weight(elapsed, LEVEL_S) * error
        trend_error = (level - self.level) / elapsed - self.trend
        trend = self.trend + _weight(elapsed, TREND_S) * trend_error
        wider = abs(error) - self.deviation
        deviation = self.deviation + _weight(elapsed, DEVIATION_S) * wider
        return LoadForecast(now, level, trend, deviation)

    def upper(self, lead_s: float) -> float:
        """Return the load in `lead_s` seconds that is hardly exceeded."""
        return max(0.0, self.level + self.trend * lead_s + NUM_DEVIATIONS * self.deviation)


def _weight(elapsed: float, time_constant: float) -> float:
    return 1 - math.exp(-elapsed / time_constant)
