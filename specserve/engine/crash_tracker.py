"""Find what makes passes fail: a request, found by isolation, or the engine itself.

Knows no workers.
"""

from __future__ import annotations

from collections import abc

from specserve.engine.sequence import Sequence

MAX_CRASHES = 3
"""Crashes in a row after which a sequence fails; all but the first happen while it runs alone."""
MAX_LOSSES = 4
"""The same, where the last crash ended the target's process, as faults from outside do, too."""
LOSSES_TO_ISOLATE = 2
"""Lost targets in a row after which the sequences of the batch run alone, rather than after one."""
MAX_STALLED_ROUNDS = 3
"""Rounds in a row without progress after which the engine is at fault."""
MAX_CULPRITS = 1
"""Sequences that fail before a pass succeeds again; with the next one the engine is at fault."""


class CrashTracker:
    """Crashed passes per sequence since it last received a token, and rounds without progress.

    A sequence that receives a token is cleared. Progress is a pass that succeeds, or a sequence
    that fails. Rounds whose target was lost with its process do not count as stalled, since another
    target comes, and its supervisor counts restarts that do not help.
    """

    def __init__(self) -> None:
        self._crashes: dict[int, int] = {}
        self._isolated_ids: set[int] = set()
        self._num_stalled = 0
        self._num_culprits = 0

    @property
    def is_engine_at_fault(self) -> bool:
        return self._num_stalled >= MAX_STALLED_ROUNDS or self._num_culprits > MAX_CULPRITS

    def record_crash(self, batch: abc.Sequence[Sequence], *, target_lost: bool) -> Sequence | None:
        """Count a crashed pass and return the sequence to fail, if there is one.

        It has reached MAX_CRASHES, or MAX_LOSSES if the target was lost, and ran alone.
        """
        most = MAX_LOSSES if target_lost else MAX_CRASHES
        for sequence in batch:
            num_crashes = self._crashes[sequence.seq_id] = self.num_crashes(sequence.seq_id) + 1
            if not target_lost or num_crashes >= LOSSES_TO_ISOLATE:
                self._isolated_ids.add(sequence.seq_id)
        if len(batch) == 1 and self._crashes[batch[0].seq_id] >= most:
            self._num_stalled = 0
            self._num_culprits += 1
            return batch[0]
        if not target_lost:
            self.record_stall()
        return None

    def record_stall(self) -> None:
        """Count a round that made no progress."""
        self._num_stalled += 1

    def record_success(self) -> None:
        """Count stalled rounds and failed sequences from 0 again: a pass succeeded."""
        self._num_stalled = self._num_culprits = 0

    def num_crashes(self, seq_id: int) -> int:
        """Return the number of crashed passes of a sequence since it last received a token."""
        return self._crashes.get(seq_id, 0)

    def clear(self, seq_ids: abc.Iterable[int]) -> None:
        """Stop tracking sequences that received a token or finished."""
        if self._crashes:
            for seq_id in seq_ids:
                self._crashes.pop(seq_id, None)
                self._isolated_ids.discard(seq_id)

    def next_to_isolate(self, running: abc.Sequence[Sequence]) -> Sequence | None:
        """Return the next sequence to run alone: fewest crashes first, then most completed passes.

        Every sequence of a crashed batch runs alone until it receives a token; if the crash ended
        the target's process, which most often has a cause outside, only those that met a second
        one. Innocent sequences are thus cleared before the culprit crashes the target again, and an
        accidental crash hits a lone sequence twice only if the accidents follow each other closely.
        A sequence that has come far is probably innocent: if it fails, too, the engine is at fault.
        """
        if not self._isolated_ids:
            return None
        candidates = [sequence for sequence in running if sequence.seq_id in self._isolated_ids]
        return min(candidates, key=self._suspicion, default=None)

    def _suspicion(self, sequence: Sequence) -> tuple[int, int]:
        return self._crashes[sequence.seq_id], -sequence.stats.target_passes
