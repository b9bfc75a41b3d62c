"""How many branches are prepared between two messages. Knows no model and no clock."""

from __future__ import annotations

from collections.abc import Iterable

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
"""A pass may take so many times as long as one over half as many branches."""
PASS_WEIGHT = 0.2
"""Weight of the newest pass in the running mean of those over as many branches."""


class BranchBudget:
    """The number of branches to draft for a group of sequences between two of its messages.

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
        self._answered_at: dict[int, float] = {}  # by group
        self._prepared_at: dict[int, float] = {}  # of groups whose work is done

    @property
    def max_branches(self) -> int:
        """Number of branches to draft; a configured fan-out is kept, busy or not."""
        return int(self.num_branches) if self._fanout.per_position is None else MAX_BRANCHES

    @property
    def max_riders(self) -> int:
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

    def width(self, num_sequences: int, num_groups: int) -> int:
        """Return how many next tokens at a position are worth looking at.

        A sequence seldom gets more than some times its share of the branches.
        """
        if self._fanout.per_position is not None:
            return self._fanout.width
        share = max(MIN_WIDTH, 4 * self.max_branches * num_groups // num_sequences)
        return min(self._fanout.width, self.max_branches, share)

    def on_answer(self, groups: Iterable[int], now: float) -> None:
        for group in groups:
            self._answered_at[group] = now
            self._prepared_at.pop(group, None)

    def on_passes(self, num_branches: int, seconds: float) -> None:
        """Record how long one pass over so many branches took."""
        self._last_size = size = num_branches.bit_length() - 1
        before = self._pass_seconds.get(size, seconds)
        self._pass_seconds[size] = before + PASS_WEIGHT * (seconds - before)

    def on_prepared(self, now: float) -> None:
        """Record that the work for all groups is done."""
        for group in self._answered_at:
            self._prepared_at.setdefault(group, now)

    def on_message(self, groups: Iterable[int], now: float) -> None:
        """Adapt the number of branches when the next message of some groups arrives."""
        for group in groups:
            answered_at = self._answered_at.pop(group, None)
            prepared_at = self._prepared_at.pop(group, None)
            if answered_at is None:
                continue
            if prepared_at is None:
                busy_fraction = 1.0
            else:
                busy_fraction = (prepared_at - answered_at) / max(now - answered_at, 1e-9)
            self._adapt(busy_fraction)

    def _adapt(self, busy_fraction: float) -> None:
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
