"""Find the request that crashes the target, by isolating the sequences of crashed batches.

Knows no workers.
"""

from __future__ import annotations

from collections import abc

from specserve.engine.sequence import Sequence

MAX_CRASHES = 3
"""Crashes in a row after which a sequence fails; all but the first happen while it runs alone."""


class CrashTracker:
    """Crashed passes per sequence since it last received a token.

    A sequence that receives one is cleared.
    """

    def __init__(self) -> None:
        self._crashes: dict[int, int] = {}

    def record_crash(self, batch: abc.Sequence[Sequence]) -> list[Sequence]:
        """Count a crashed pass and return the sequence to fail, if there is one.

        It has reached MAX_CRASHES and ran alone.
        """
        for sequence in batch:
            self._crashes[sequence.seq_id] = self._crashes.get(sequence.seq_id, 0) + 1
        return [
            sequence
            for sequence in batch
            if len(batch) == 1 and self._crashes[sequence.seq_id] >= MAX_CRASHES
        ]

    def clear(self, seq_ids: abc.Iterable[int]) -> None:
        """Stop tracking sequences that received a token or finished."""
        if self._crashes:
            for seq_id in seq_ids:
                self._crashes.pop(seq_id, None)

    def next_to_isolate(self, running: abc.Sequence[Sequence]) -> Sequence | None:
        """Return the next sequence to run alone, fewest crashes first.

        Every sequence of a crashed batch runs alone until it receives a token. Innocent sequences
        are thus cleared before the culprit crashes the target again, and an accidental crash hits
        a lone sequence twice only if the accidents follow each other closely.
        """
        if not self._crashes:
            return None
        tracked = [sequence for sequence in running if sequence.seq_id in self._crashes]
        return min(tracked, key=lambda sequence: self._crashes[sequence.seq_id], default=None)
