"""Choice of the sequence that computes a page of a prompt, so that equal ones are computed once.

Knows hashes of pages; what a worker's prefix cache holds is inferred, and a mistake costs time.
"""

from __future__ import annotations

from collections import abc
from operator import attrgetter

from specserve.engine.sequence import Sequence

NumCached = abc.Callable[[Sequence], int]
IN_TARGET: NumCached = attrgetter("target_cached")
IN_DRAFTER: NumCached = attrgetter("draft_cached")


class PrefixIndex:
    """The full pages of prompts, each with its owner, by a hash of salt and tokens up to its end.

    The owner is a sequence whose pass computes the page, or has computed it. Other sequences find
    the page in the prefix cache of the worker afterwards. The last token of a sequence is on no
    page here: it must be computed for its logits.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._owners: dict[int, Sequence] = {}
        self._hashes: dict[int, list[int]] = {}  # of the pages of each sequence, by its id
        self._finished: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._owners)

    def num_shared(self, sequence: Sequence, cached: NumCached = IN_TARGET) -> int:
        """Return how many of the next tokens of a sequence others have in a worker's cache.

        A sequence that stands inside a page cannot attach further pages. In the target, one whose
        prompt is scored attaches none.
        """
        first, inside = divmod(cached(sequence), self._page_size)
        if inside or (cached is IN_TARGET and sequence.scores_prompt):
            return 0
        hashes, page = self._page_hashes(sequence), first
        while page < len(hashes) and self._has_page(hashes[page], page, cached):
            page += 1
        return (page - first) * self._page_size

    def page_behind(self, sequence: Sequence, num_shared: int) -> int | None:
        """Return the hash of the page to compute next; None if no full page is left."""
        hashes = self._page_hashes(sequence)
        page = (sequence.target_cached + num_shared) // self._page_size
        return hashes[page] if page < len(hashes) else None

    def must_compute(self, sequence: Sequence) -> bool:
        """Return whether the sequence cannot attach the next page of the target.

        That is so inside a page, and for a prompt that is scored.
        """
        return sequence.target_cached % self._page_size != 0 or sequence.scores_prompt

    def claim(self, sequence: Sequence, stop: int) -> None:
        """Record that the next pass computes the sequence's tokens up to `stop`, or attaches them.

        Pages that a running sequence has already keep their owner.
        """
        first, last = sequence.target_cached // self._page_size, stop // self._page_size
        for page, page_hash in enumerate(self._page_hashes(sequence)[first:last], first):
            if self._owner_is_gone(page_hash) or not self._has_page(page_hash, page, IN_TARGET):
                self._owners[page_hash] = sequence

    def drop(self, sequence: Sequence) -> None:
        """Drop a sequence whose pages are freed."""
        for page_hash in self._hashes.pop(sequence.seq_id, ()):
            if self._owners.get(page_hash) is sequence:
                del self._owners[page_hash]

    def drop_later(self, sequence: Sequence) -> None:
        """Drop a finished sequence after the next round.

        Its pages can be found until their space is needed; those who wait for them attach them in
        that round and own them then.
        """
        self._finished.append(sequence)

    def drop_finished(self) -> None:
        for sequence in self._finished:
            self.drop(sequence)
        self._finished.clear()

    def _has_page(self, page_hash: int, page: int, cached: NumCached) -> bool:
        owner = self._owners.get(page_hash)
        return owner is not None and cached(owner) >= (page + 1) * self._page_size

    def _owner_is_gone(self, page_hash: int) -> bool:
        owner = self._owners.get(page_hash)
        return owner is None or owner.finish is not None

    def _page_hashes(self, sequence: Sequence) -> list[int]:
        hashes = self._hashes.get(sequence.seq_id)
        if hashes is None:
            hashes = self._hashes[sequence.seq_id] = list(
                _chained_hashes(sequence, self._page_size)
            )
        return hashes


def _chained_hashes(sequence: Sequence, page_size: int) -> abc.Iterator[int]:
    """Yield a hash for each full page of all tokens but the last."""
    tokens, page_hash = sequence.committed, hash(sequence.policy.cache_salt)
    for stop in range(page_size, len(tokens), page_size):
        page_hash = hash((page_hash, *tokens[stop - page_size : stop]))
        yield page_hash
