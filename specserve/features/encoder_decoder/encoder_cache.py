"""Encoder inputs of an encoder-decoder's sequences: encoded once, kept in pages of the KV cache.

Sequences with the same encoder input share it. Knows no model.
"""

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
from specserve.models.layout import AttentionGroup, Geometry, Ints, Writes
from specserve.models.planner import Planner
from specserve.transfers import to_device
from specserve.types import Step

Tokens = tuple[int, ...]


class Encoder(Protocol):
    """The encoder of a model, with its decoder's cross-attention keys and values."""

    def encode(self, ids: Tensor, lengths: Sequence[int], slots: Tensor) -> None:
        """Encode concatenated inputs and write what the decoder attends to into these slots."""
        ...


@dataclass(slots=True)
class EncoderInput:
    """A sequence of its own in the cache, never truncated."""

    tokens: Tokens
    cache_id: int
    num_holders: int = 0  # sequences


class EncoderCache:
    """The encoder input that each sequence attends to.

    Several continuations of a prompt, and the branches of a draft, share one.
    """

    def __init__(self, encoder: Encoder, cache: PagedCache, geometry: Geometry) -> None:
        self._encoder, self._cache = encoder, cache
        self._planner = Planner(geometry)
        self._cache_ids = itertools.count(-1, -1)  # no sequence has an id below 0
        self._by_tokens: dict[Tokens, EncoderInput] = {}
        self._by_sequence: dict[int, EncoderInput] = {}

    def encode(self, steps: Sequence[Step]) -> None:
        """Encode the encoder inputs of these steps that are not cached yet.

        Raises OutOfPages; nothing has changed then.
        """
        tokens_of = {step.seq_id: step.encoder_input for step in steps if step.encoder_input}
        fresh = [
            EncoderInput(tokens, next(self._cache_ids))
            for tokens in dict.fromkeys(tokens_of.values())
            if tokens not in self._by_tokens
        ]
        if fresh:
            self._reserve(fresh)
            self._encode(fresh)
            self._by_tokens |= {one.tokens: one for one in fresh}
        for seq_id, tokens in tokens_of.items():
            self._hold(seq_id, self._by_tokens[tokens])

    def cross_groups(self, seq_ids: Sequence[int], counts: Ints) -> tuple[AttentionGroup, ...]:
        """Return the cross-attention groups of a pass with `counts` rows of each sequence."""
        held = [self._by_sequence[seq_id].cache_id for seq_id in seq_ids]
        lengths = np.array([self._cache.length(cache_id) for cache_id in held])
        block_table = self._cache.block_table(
            held, self._planner.geometry.num_pages(int(max(lengths.max(), counts.max())))
        )
        return self._planner.lay_out(
            Writes(np.zeros_like(lengths), counts, block_table, encoder_lengths=lengths)
        ).groups

    def fork(self, seq_id: int, branch_id: int) -> None:
        self._hold(branch_id, self._by_sequence[seq_id])

    def promote_branch(self, seq_id: int, branch_id: int) -> None:
        self.release(seq_id)
        self._by_sequence[seq_id] = self._by_sequence.pop(branch_id)

    def release(self, seq_id: int) -> None:
        """Release a sequence's encoder input, and its pages with the last holder.

        Unknown ids are allowed.
        """
        held = self._by_sequence.pop(seq_id, None)
        if held is None:
            return
        held.num_holders -= 1
        if not held.num_holders:
            self._cache.release(held.cache_id)
            del self._by_tokens[held.tokens]

    def _hold(self, seq_id: int, encoder_input: EncoderInput) -> None:
        # Counted first: the sequence may be the last holder of this same input.
        encoder_input.num_holders += 1
        self.release(seq_id)
        self._by_sequence[seq_id] = encoder_input

    def _reserve(self, fresh: Sequence[EncoderInput]) -> None:
        try:
            for one in fresh:
                self._cache.reserve(one.cache_id, len(one.tokens))
        except OutOfPages:
            for one in fresh:
                self._cache.release(one.cache_id)
            raise

    def _encode(self, fresh: Sequence[EncoderInput]) -> None:
        for one in fresh:
            self._cache.append(one.cache_id, one.tokens)
        lengths = [len(one.tokens) for one in fresh]
        slots = torch.cat([self._cache.slots(one.cache_id, 0, len(one.tokens)) for one in fresh])
        ids = to_device(
            np.array([token for one in fresh for token in one.tokens]), self._cache.device
        )
        self._encoder.encode(ids, lengths, slots)
