"""The sources of an encoder-decoder's sequences: read once, kept in pages of the cache, shared by whoever has the same one. Knows no model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specserve.errors import OutOfPages
from specserve.models.cache import PagedCache
from specserve.models.layout import Geometry, Group, Ints, Planner, Writes
from specserve.types import Step

Tokens = tuple[int, ...]


class Encoder(Protocol):
    """Reads sources, one behind the other, and writes what a decoder will look at into these slots of the cache."""

    def encode(self, ids: Tensor, lengths: Sequence[int], slots: Tensor) -> None: ...


@dataclass(slots=True)
class Source:
    """A text of its own in the cache, never truncated."""

    tokens: Tokens
    cache_id: int
    holders: int = 0  # sequences


class Sources:
    """Which source each sequence looks at. Several continuations of a prompt, and the branches of a draft, look at the same one."""

    def __init__(self, encoder: Encoder, cache: PagedCache, geometry: Geometry) -> None:
        self._encoder, self._cache = encoder, cache
        self._planner = Planner(geometry)
        self._cache_ids = itertools.count(-1, -1)  # no sequence has one below 0
        self._known: dict[Tokens, Source] = {}
        self._of: dict[int, Source] = {}

    def read(self, steps: Sequence[Step]) -> None:
        """Encodes what steps bring along, unless it is known. Raises OutOfPages; nothing changed then."""
        brought = {step.seq_id: step.source for step in steps if step.source}
        fresh = [
            Source(tokens, next(self._cache_ids))
            for tokens in dict.fromkeys(brought.values())
            if tokens not in self._known
        ]
        if fresh:
            self._reserve(fresh)
            self._encode(fresh)
            self._known |= {source.tokens: source for source in fresh}
        for seq_id, tokens in brought.items():
            self._hold(seq_id, self._known[tokens])

    def groups(self, seq_ids: Sequence[int], counts: Ints) -> tuple[Group, ...]:
        """Of a pass that has so many rows of each sequence: the rows before their sources."""
        held = [self._of[seq_id].cache_id for seq_id in seq_ids]
        lengths = np.array([self._cache.length(cache_id) for cache_id in held])
        table = self._cache.table(
            held, self._planner.geometry.num_pages(int(max(lengths.max(), counts.max())))
        )
        return self._planner.lay_out(
            Writes(np.zeros_like(lengths), counts, table, seen=lengths)
        ).groups

    def fork(self, seq_id: int, as_id: int) -> None:
        self._hold(as_id, self._of[seq_id])

    def become(self, seq_id: int, other_id: int) -> None:
        self.release(seq_id)
        self._of[seq_id] = self._of.pop(other_id)

    def release(self, seq_id: int) -> None:
        """Unknown ids are fine."""
        source = self._of.pop(seq_id, None)
        if source is None:
            return
        source.holders -= 1
        if not source.holders:
            self._cache.release(source.cache_id)
            del self._known[source.tokens]

    def _hold(self, seq_id: int, source: Source) -> None:
        source.holders += 1  # first, lest it go with its last holder, who may be the same
        self.release(seq_id)
        self._of[seq_id] = source

    def _reserve(self, fresh: Sequence[Source]) -> None:
        try:
            for source in fresh:
                self._cache.reserve(source.cache_id, len(source.tokens))
        except OutOfPages:
            for source in fresh:
                self._cache.release(source.cache_id)
            raise

    def _encode(self, fresh: Sequence[Source]) -> None:
        for source in fresh:
            self._cache.append(source.cache_id, source.tokens)
        lengths = [len(source.tokens) for source in fresh]
        slots = torch.cat(
            [self._cache.slots(source.cache_id, 0, len(source.tokens)) for source in fresh]
        )
        ids = torch.tensor(
            [token for source in fresh for token in source.tokens], device=self._cache.device
        )
        self._encoder.encode(ids, lengths, slots)
