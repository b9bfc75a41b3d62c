"""Which request is to blame when the target dies again and again in the middle of a pass. Knows no workers."""

from __future__ import annotations

from collections import abc

from specserve.engine.sequence import Sequence

MAX_DEATHS = 3  # in a row, of batches with the same request in them; all but the first of it alone


class Suspects:
    """Counts for each sequence the passes that died with it since it last got a token. Once it gets one it is no suspect any more."""

    def __init__(self) -> None:
        self._deaths: dict[int, int] = {}

    def blame(self, batch: abc.Sequence[Sequence]) -> list[Sequence]:
        """After a pass that died: the one that can be blamed, if there is one. It must have died often enough, and alone the last time."""
        for sequence in batch:
            self._deaths[sequence.seq_id] = self._deaths.get(sequence.seq_id, 0) + 1
        return [
            sequence
            for sequence in batch
            if len(batch) == 1 and self._deaths[sequence.seq_id] >= MAX_DEATHS
        ]

    def acquit(self, seq_ids: abc.Iterable[int]) -> None:
        """They got a token, or have ended."""
        if self._deaths:
            for seq_id in seq_ids:
                self._deaths.pop(seq_id, None)

    def alone(self, running: abc.Sequence[Sequence]) -> Sequence | None:
        """Who must run without company next: whoever was there, one after the other, until each has a token. The least suspect first: chance
        strikes a lone pass again only if it comes soon, and those who are innocent have their tokens before the guilty one kills again.
        """
        if not self._deaths:
            return None
        suspects = [sequence for sequence in running if sequence.seq_id in self._deaths]
        return min(suspects, key=lambda sequence: self._deaths[sequence.seq_id], default=None)
