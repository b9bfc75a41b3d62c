"""Fair shares of a drafter that several engines use: places in a batch, and pages of its cache.

Knows ids, pages and numbers; no tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from specserve.types import DraftStep

SEQ_ID_BITS = 40
"""Bits of a sequence's id within its engine. The number of the engine stands above them."""
MAX_ENGINES = 2**20
"""Engines that a pool numbers in its life; their sequences' ids stay below the ids of branches."""


def pool_seq_id(engine: int, seq_id: int) -> int:
    """Return the id that a sequence of an engine has in the pool."""
    return engine << SEQ_ID_BITS | seq_id


def engine_of(pool_id: int) -> int:
    """Return the number of the engine whose sequence has this id in the pool."""
    return pool_id >> SEQ_ID_BITS


def seq_id_of(pool_id: int) -> int:
    """Return the id that the sequence has in its engine."""
    return pool_id % (1 << SEQ_ID_BITS)


def fair_places(wanted: Mapping[int, int], total: int) -> dict[int, int]:
    """Return how many of `total` places each engine gets; at least one if it wants any.

    Shares are equal, and what an engine does not want of its share goes to the others.
    """
    places: dict[int, int] = {}
    left = max(total, len(wanted))
    for number, engine in enumerate(sorted(wanted, key=lambda engine: wanted[engine])):
        places[engine] = min(wanted[engine], left // (len(wanted) - number))
        left -= places[engine]
    return places


class CacheShares:
    """Pages that the sequences of each engine hold, counted as if none were shared.

    Any engine may use what is free. When pages run out, the engine with the most of them loses its
    sequences, those that were unused longest first. So an engine with an equal share or less never
    loses one, whatever the others do.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self._page_size = num_pages, page_size
        self._held: dict[int, dict[int, int]] = {}  # engine: sequence: pages; last used, last

    def make_room(self, steps: Sequence[DraftStep]) -> set[int]:
        """Count the pages of the steps, and return the sequences to drop for them to fit.

        A sequence with a step may be among them.
        """
        for step in steps:
            held = self._held.setdefault(engine_of(step.seq_id), {})
            held.pop(step.seq_id, None)
            held[step.seq_id] = self._num_pages(step)
        totals = {engine: sum(held.values()) for engine, held in self._held.items()}
        dropped: set[int] = set()
        while sum(totals.values()) > self.num_pages:
            engine = max(totals, key=lambda engine: totals[engine])
            seq_id = next(iter(self._held[engine]))
            totals[engine] -= self._held[engine].pop(seq_id)
            dropped.add(seq_id)
        return dropped

    def release(self, seq_ids: Collection[int]) -> None:
        for seq_id in seq_ids:
            self._held.get(engine_of(seq_id), {}).pop(seq_id, None)

    def remove_engine(self, engine: int) -> list[int]:
        """Remove an engine, and return the sequences that it had."""
        return list(self._held.pop(engine, {}))

    def num_held(self, engine: int) -> int:
        """Return the number of pages of an engine's sequences."""
        return sum(self._held.get(engine, {}).values())

    def _num_pages(self, step: DraftStep) -> int:
        """Return the pages of a sequence after the step, and one more, which may be copied."""
        length = max(step.stop + step.gamma, len(step.encoder_input))
        return -(-length // self._page_size) + 1
