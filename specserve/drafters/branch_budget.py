"""How many branches are prepared between two messages. Knows no model."""

from __future__ import annotations

from collections.abc import Callable

from specserve.drafters.branches import Fanout

MIN_BRANCHES = 4
MAX_BRANCHES = 128
MAX_BUSY_FRACTION = 0.9
"""Fraction of the time between an answer and the next message that is spent on preparing.

With less than all of it, the message seldom waits.
"""
MIN_WIDTH = 8
"""Next tokens at a position that are looked at, at least."""
MAX_PASS_GROWTH = 1.1
"""A pass may take that many times as long as one over half as many branches."""
PASS_WEIGHT = 0.2
"""Weight of the newest pass in the running mean of those over as many branches."""


class BranchBudget:
    """The number of branches to draft for an engine's sequences between two of its messages.

    It grows while there is time to spare. It shrinks when a message arrives before all is done, as
    long as that makes the passes clearly shorter: where a pass over many branches takes as long as
    one over few, fewer of them would only miss more often.
    """

    def __init__(self, fanout: Fanout) -> None:
        self._fanout = fanout
        self.num_branches = 16.0
        # Seconds of a pass over the branches, by the power of two that is at most their number.
        self._pass_seconds: dict[int, float] = {}
        self._last_size = 0  # of those passes

    @property
    def max_branches(self) -> int:
        """Number of branches to draft; a configured fan-out is kept, busy or not."""
        return int(self.num_branches) if self._fanout.per_position is None else MAX_BRANCHES

    @property
    def max_extra_steps(self) -> int:
        """Number of branches in a pass for a message that make it hardly longer, as measured."""
        if not self._pass_seconds:
            return MIN_BRANCHES
        shortest = self._pass_seconds[min(self._pass_seconds)]
        sizes = [
            size
            for size, seconds in self._pass_seconds.items()
            if seconds <= MAX_PASS_GROWTH * shortest
        ]
        return 1 << max(sizes)

    def width(self, num_sequences: int) -> int:
        """Return how many next tokens at a position are worth looking at.

        A sequence seldom gets more than some times its share of the branches.
        """
        if self._fanout.per_position is not None:
            return self._fanout.width
        share = max(MIN_WIDTH, 4 * self.max_branches // num_sequences)
        return min(self._fanout.width, self.max_branches, share)

    def on_passes(self, num_branches: int, seconds: float) -> None:
        """Record how long one pass over that many branches took."""
        self._last_size = size = num_branches.bit_length() - 1
        before = self._pass_seconds.get(size, seconds)
        self._pass_seconds[size] = before + PASS_WEIGHT * (seconds - before)

    def adapt(self, busy_fraction: float) -> None:
        """Adapt the number of branches to the fraction of an idle time that preparing took."""
        if busy_fraction < MAX_BUSY_FRACTION:
            factor = 1.1
        else:
            factor = 0.9 if self._would_gain_by_fewer else 1.05
        self.num_branches = min(MAX_BRANCHES, max(MIN_BRANCHES, self.num_branches * factor))

    @property
    def _would_gain_by_fewer(self) -> bool:
        """True if passes grow clearly with the branches, or fewer were not tried yet."""
        for fewer in (self._last_size - 1, self._last_size):
            few, many = self._pass_seconds.get(fewer), self._pass_seconds.get(fewer + 1)
            if few is not None and many is not None:
                return many > MAX_PASS_GROWTH * few
        return True


class IdleTime:
    """The time between an answer and the next message, and when all was prepared in it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answered_at: float | None = None
        self._prepared_at: float | None = None

    def begin(self) -> None:
        """Begin with an answer."""
        self._answered_at, self._prepared_at = self._clock(), None

    def on_prepared(self) -> None:
        """Record that all is prepared, the first time."""
        if self._answered_at is not None and self._prepared_at is None:
            self._prepared_at = self._clock()

    def end(self) -> float | None:
        """End with a message; return the fraction spent on preparing, or None without an answer."""
        answered_at, prepared_at = self._answered_at, self._prepared_at
        self._answered_at = self._prepared_at = None
        if answered_at is None:
            return None
        if prepared_at is None:
            return 1.0
        return (prepared_at - answered_at) / max(self._clock() - answered_at, 1e-9)
