"""Find passes that are far slower than others of their size on the same device.

Knows counts and seconds; no workers. The pacer's CostEstimate cannot serve here: it follows the
last rounds, so a slow device would be what it expects after some twenty of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

SLOW_FACTOR = 5.0
"""Multiple of the median of its size that a slow pass takes."""
MIN_EXCESS_S = 0.05
"""Time beyond that median that a slow pass takes, too: less is a host that is busy for a moment."""
MIN_PASSES = 20
"""Passes of a size that must have been seen before one is found slow."""
MAX_PASSES = 64
"""Passes of a size whose times are kept."""
NUM_RECENT = 32
"""Passes of which more than half are slow while the device counts as slow."""
RELEARN_S = 600.0
"""Time of being slow after which the medians describe another load, and are learnt again."""


@dataclass(frozen=True, slots=True)
class SlowPass:
    """A pass that took far longer than usual."""

    num_tokens: int
    seconds: float
    expected_seconds: float


class PassMedians:
    """Median seconds of a device's passes by size, which slow ones do not enter."""

    def __init__(self) -> None:
        # By the powers of two that tokens of the pass, and tokens in its KV caches, come to.
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._recent: deque[bool] = deque(maxlen=NUM_RECENT)  # which of the last ones were slow
        self._slow_since: float | None = None

    def observe(
        self, num_tokens: int, num_cached: int, seconds: float, *, now: float
    ) -> SlowPass | None:
        """Include a pass, and return it if it was slow.

        While the device counts as slow, no median is learnt: it would be that of slow passes.
        """
        if self.slow_for(now) >= RELEARN_S:
            self.clear()
        size = num_tokens.bit_length(), num_cached.bit_length()
        usual = self._seconds.setdefault(size, deque(maxlen=MAX_PASSES))
        if len(usual) < MIN_PASSES:
            if self._slow_since is None:
                usual.append(seconds)
            return None
        expected = median(usual)
        is_slow = seconds > max(SLOW_FACTOR * expected, expected + MIN_EXCESS_S)
        self._recent.append(is_slow)
        if 2 * sum(self._recent) <= NUM_RECENT:
            self._slow_since = None
        elif self._slow_since is None:
            self._slow_since = now
        if is_slow:
            return SlowPass(num_tokens, seconds, expected)
        usual.append(seconds)
        return None

    def slow_for(self, now: float) -> float:
        """Return for how many seconds most of the recent passes have been slow."""
        return 0.0 if self._slow_since is None else now - self._slow_since

    def clear(self) -> None:
        """Learn all medians again, as on another device."""
        self._seconds.clear()
        self._recent.clear()
        self._slow_since = None
