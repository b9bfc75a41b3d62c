"""Bound how long imports of pages make rounds, by what earlier imports took.

Knows bytes and seconds; no pages, no rounds, no clock.
"""

from __future__ import annotations

MAX_SHARE = 0.25
"""Share of a round's length by which imported pages may lengthen it."""
FIRST_BYTES = 2**20
"""Bytes of the first import, before any has been measured."""
GROWTH = 2.0
"""Multiple of the largest import measured so far that the next one may have at most."""
DECAY = 0.5
"""Weight of earlier imports in the mean seconds per byte, for each later one."""
BLEND = 0.1
"""Weight of the newest round in the mean length of rounds, and in that of their overhead."""


class ImportBudget:
    """Bytes of pages that fit into a round, and the measurements that say so."""

    def __init__(self) -> None:
        self._largest = FIRST_BYTES / GROWTH
        self._bytes = self._seconds = 0.0  # imported, and taken for it; earlier imports fade
        self._pass_s: float | None = None  # mean of passes
        self._overhead_s: float | None = None  # mean of rounds without an import

    @property
    def num_bytes(self) -> int:
        """Return the bytes that lengthen a round by MAX_SHARE, or fewer while that is unknown."""
        most = self._largest * GROWTH
        if self._seconds > 0:
            # A fixed cost counts as seconds per byte, too, so this approaches what really fits.
            most = min(most, MAX_SHARE * (self._pass_s or 0.0) * self._bytes / self._seconds)
        return int(most)

    def observe(self, num_bytes: int, *, pass_s: float | None, overhead_s: float) -> None:
        """Take the measurements of a round that imported so many bytes.

        `pass_s` is the length of its pass, None for a round without sequences; `overhead_s` is what
        the round took beyond the pass.
        """
        if pass_s is not None:
            self._pass_s = _blend(self._pass_s, pass_s)
        if not num_bytes:
            self._overhead_s = _blend(self._overhead_s, overhead_s)
            return
        self._largest = max(self._largest, num_bytes)
        self._bytes = DECAY * self._bytes + num_bytes
        # Sums instead of a mean of ratios: a small import's time is mostly noise.
        self._seconds = DECAY * self._seconds + max(0.0, overhead_s - (self._overhead_s or 0.0))


def _blend(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + BLEND * (newest - mean)
