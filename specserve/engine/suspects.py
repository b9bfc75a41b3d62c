"""Which request is to blame when the target dies again and again in the middle of a pass. Knows no workers."""

from __future__ import annotations

from collections import abc

from specserve.engine.sequence import Sequence

MAX_DEATHS = 3  # in a row, of batches with the same request in them
ALONE_AFTER = 2  # then it runs alone, so that no other request is blamed for it


class Suspects:
    """Counts for each sequence the passes that died with it since it last got a token. Once it gets one it is no suspect any more."""

    def __init__(self) -> None:
        self._deaths: dict[int, int] = {}

    def blame(self, batch: abc.Sequence[Sequence]) -> list[Sequence]:
        """After a pass that died: the one that can be blamed, if there is one. It must have died alone, and often enough."""
        for sequence in batch:
            self._deaths[sequence.seq_id] = self._deaths.get(sequence.seq_id, 0) + 1
        return [sequence for sequence in batch if len(batch) == 1 and self._deaths[sequence.seq_id] >= MAX_DEATHS]

    def acquit(self, seq_ids: abc.Iterable[int]) -> None:
        """They got a token, or have ended."""
        if self._deaths:
            for seq_id in seq_ids:
                self._deaths.pop(seq_id, None)

    def alone(self, running: abc.Sequence[Sequence]) -> Sequence | None:
        """Who must run without company next."""
        if not self._deaths:
            return None
        return next((sequence for sequence in running if self._deaths.get(sequence.seq_id, 0) >= ALONE_AFTER), None)
