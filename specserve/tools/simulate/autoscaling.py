"""How many replicas there should be, by the rule that Ray Serve applies. Knows counts and a clock's readings; no replicas."""

from __future__ import annotations

import math
from collections import deque

from specserve.config.tree import Replicas

LOOK_BACK_S = 30.0
_SAME = 1e-6  # seconds; sums of floats


class Autoscaler:
    """Asked every now and then. A change is made once it has been wanted, without a break, for the delay of its direction."""

    def __init__(self, rules: Replicas) -> None:
        self._rules = rules
        self._look_back = max(
            1.0, min(LOOK_BACK_S, rules.upscale_delay_s, rules.downscale_delay_s)
        )  # as cluster/app.py sets it
        self._seen: deque[tuple[float, int]] = deque()
        self._direction = 0  # of the change that is wanted
        self._since = 0.0

    def decide(self, now: float, *, current: int, ongoing: int) -> int:
        """How many to have from now on; `ongoing` counts all requests, those that wait for a replica included."""
        wanted = self._wanted(now, ongoing)
        direction = (wanted > current) - (wanted < current)
        if direction != self._direction:
            self._direction, self._since = direction, now
        delay = self._rules.upscale_delay_s if direction > 0 else self._rules.downscale_delay_s
        if not direction or now - self._since + _SAME < delay:
            return current
        self._direction = 0
        return wanted if direction > 0 or current == 1 else max(1, wanted)  # to none only from one

    def _wanted(self, now: float, ongoing: int) -> int:
        self._seen.append((now, ongoing))
        while self._seen[0][0] < now - self._look_back:
            self._seen.popleft()
        mean = sum(count for _, count in self._seen) / len(self._seen)
        return max(
            self._rules.min,
            min(self._rules.max, math.ceil(mean / self._rules.target_ongoing_requests)),
        )
