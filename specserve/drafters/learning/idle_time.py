"""Idle time of a worker, for work that no message waits for. Knows no model.

Such work comes in steps that cannot be interrupted. One starts if it will probably end before the
next message, if no message is expected at all, or if all steps that a message may have waited for
take no more than a small share of the time.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

MAX_SHARE = 0.05
"""Share of all time for which messages may wait for steps, one step at most each."""
MAX_CREDIT_S = 1.0
"""Unused time of that share that is kept for later."""
GAPS = 64
"""Latest gaps between an answer and the next message, by which the next one is predicted."""
SILENCE = 4.0
"""After so many median gaps without a message none is expected."""
MAX_SILENCE_S = 0.25


class IdleTime:
    """The gaps between a worker's answers and its next messages."""

    def __init__(self, *, clock: Callable[[], float], share: float = MAX_SHARE) -> None:
        self._clock, self._share = clock, share
        self._gaps: deque[float] = deque(maxlen=GAPS)
        self._answered_at: float | None = None  # None: a message is being answered
        self._credit_s, self._credited_at = 0.0, clock()

    def on_message(self) -> None:
        if self._answered_at is not None:
            self._gaps.append(self._clock() - self._answered_at)
        self._answered_at = None

    def on_answer(self) -> None:
        self._answered_at = self._clock()

    def wait_s(self, step_s: float) -> float:
        """Return the seconds until a step of so many seconds may start; 0: now."""
        now = self._clock()
        self._credit_s += self._share * (now - self._credited_at)
        self._credit_s, self._credited_at = min(self._credit_s, MAX_CREDIT_S + step_s), now
        until_credit = max(0.0, step_s - self._credit_s) / self._share
        if self._answered_at is None:
            return until_credit
        elapsed = now - self._answered_at
        until_silence = max(0.0, self._silence_s - elapsed)
        if self._gaps and elapsed + step_s < min(self._gaps):
            return 0.0
        return min(until_credit, until_silence)

    def on_step(self, step_s: float, *, is_awaited: bool) -> None:
        """Count a step; a message that has come meanwhile may have waited for all of it."""
        if is_awaited or self._answered_at is None:
            self._credit_s -= step_s

    @property
    def _silence_s(self) -> float:
        if not self._gaps:
            return MAX_SILENCE_S
        return min(MAX_SILENCE_S, SILENCE * statistics.median(self._gaps))
