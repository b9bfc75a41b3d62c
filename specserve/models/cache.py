"""Paged KV cache of a target or draft model: reserve, append, truncate, fork, release.

Positions below a truncation are committed. Full committed pages are registered by a hash chained
over all tokens of their prefix and the sequence's salt, and another sequence that starts with the
same tokens and salt attaches them instead of computing them. Draft tokens are never registered.
Knows no model.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.claimed_memory import ClaimedMemory
from specserve.errors import OutOfPages
from specserve.models.float8_pages import STORED_AS, UNSCALED, PageScales
from specserve.models.float8_weight import FLOAT8
from specserve.models.pages import BlockTable, PageAllocator, page_hashes
from specserve.transfers import to_device

CLAIMED_LATER = 2**28
"""Bytes of memory of the host from which a start does not wait until it is claimed."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A wish to start `branch_id` as a copy of the first `length` positions of `seq_id`."""

    seq_id: int
    branch_id: int
    length: int


def num_spare_pages(device: torch.device) -> int:
    """Return how many pages a cache has that no sequence owns: spare rows of graphs write one."""
    return int(device.type == "cuda")


class _CachedSequence:
    """The cached part of one sequence. Its pages are row `row` of the cache's block table."""

    __slots__ = ("page_hashes", "reserved", "row", "salt", "tokens")

    def __init__(self, row: int, salt: bytes = b"") -> None:
        self.row, self.salt = row, salt
        # Positions that its pages have room for; those past the length are not shared.
        self.reserved = 0
        self.tokens = array("q")  # the sequence's length is theirs
        self.page_hashes: list[bytes] = []  # of the full pages that are known to be committed

    @property
    def last_hash(self) -> bytes:
        return self.page_hashes[-1] if self.page_hashes else self.salt


class PagedCache:
    """A KV cache in pages that sequences share.

    Slot `page * page_size + offset` of every layer's `keys` and `values` holds one position of one
    sequence. A page that other sequences hold too, or find by its hash, is never written: `reserve`
    copies or unregisters it first.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device | str,
        page_size: int = 16,
        v_head_dim: int | None = None,
        prefix_caching: bool = True,
        state_width: int = 0,
        scales: Sequence[PageScales] = (),
    ) -> None:
        """Create a cache; with a `state_width` each slot also has a state of that many numbers.

        Pages of FP8 numbers have `scales`, one pair a layer; without them all are 1.
        """
        self.kv_heads, self.page_size = kv_heads, page_size
        self.device, self.prefix_caching = torch.device(device), prefix_caching
        self.prefix_queries = 0  # tokens looked up in the prefix cache
        self.prefix_hits = 0  # tokens found there
        # Of these, by sequence, what its target has not reported yet.
        self.unreported_hits: dict[int, int] = {}
        self._num_layers, self._dims, self._dtype = (
            num_layers,
            (head_dim, v_head_dim or head_dim),
            dtype,
        )
        self._state_width = state_width
        self.states = torch.empty(0)  # [slots, state width], for a network that reads and writes it
        self.scales = tuple(scales) or (UNSCALED,) * num_layers
        self.keys: list[Tensor] = []  # of each layer, [slots, kv_heads, dim]
        self.values: list[Tensor] = []
        self._pools: list[Tensor] = []
        self.resize(num_pages)

    def resize(self, num_pages: int) -> None:
        """Empty the cache and give it that many pages, in the same lists of tensors."""
        self.num_pages = num_pages
        for tensors in (self.keys, self.values, self._pools):
            tensors.clear()  # before there are new ones
        all_pages = num_pages + num_spare_pages(self.device)
        shape = (self._num_layers, all_pages, self.page_size, self.kv_heads)
        for layers, dim in zip((self.keys, self.values), self._dims, strict=True):
            stored = STORED_AS if self._dtype == FLOAT8 else self._dtype
            pool = _zeros((*shape, dim), stored, self.device)
            self._pools.append(pool)
            layers.extend(pool.view(self._dtype).flatten(1, 2).unbind(0))
        if self._state_width:
            pool = _zeros((1, *shape[1:3], self._state_width), self._dtype, self.device)
            self._pools.append(pool)
            self.states = pool.flatten(0, 2)
        self._allocator = PageAllocator(num_pages)
        self._sequences: dict[int, _CachedSequence] = {}
        self._block_table = BlockTable()

    @property
    def num_free(self) -> int:
        """Number of pages that a reservation can get, evictable ones included."""
        return self._allocator.num_free

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def length(self, seq_id: int) -> int:
        sequence = self._sequences.get(seq_id)
        return 0 if sequence is None else len(sequence.tokens)

    def tokens(self, seq_id: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Return a copy of the cached token ids, or of those from `start` to `stop`."""
        return np.array(self._sequences[seq_id].tokens[start:stop], dtype=np.int64)

    def holds(self, seq_id: int, start: int, tokens: Sequence[int]) -> bool:
        """Return whether these tokens are cached from `start` on."""
        sequence = self._sequences.get(seq_id)
        return sequence is not None and sequence.tokens[start : start + len(tokens)] == array(
            "q", tokens
        )

    def begin(self, seq_id: int, salt: bytes) -> None:
        """Start a sequence that shares pages with others of the same salt, unless it is there."""
        if seq_id not in self._sequences:
            self._add_sequence(seq_id).salt = salt

    def reserve(self, seq_id: int, length: int) -> None:
        """Make room up to `length`, in whole pages that this sequence alone may write.

        Raises OutOfPages; nothing has changed then.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is not None and length <= sequence.reserved:
            return
        missing = self._num_missing(sequence, length)
        if missing > self._allocator.num_free:
            raise OutOfPages(
                f"{missing} more pages are needed for {length} positions, and "
                f"{self._allocator.num_free} of {self.num_pages} are free."
            )
        if sequence is None:
            sequence = self._add_sequence(seq_id)
        if sequence.reserved % self.page_size:
            self._make_tail_writable(sequence)
        if missing:
            self._allocate_pages(sequence, length)
        sequence.reserved = self._num_pages(length) * self.page_size

    def append(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Record tokens whose keys and values are about to be written into reserved room."""
        sequence = self._sequences[seq_id]
        assert len(sequence.tokens) + len(tokens) <= sequence.reserved, "append without reserve"
        sequence.tokens.extend(tokens)

    def truncate(self, seq_id: int, length: int, *, committed: int | None = None) -> None:
        """Roll back: drop cached positions past `length`, such as rejected draft tokens'.

        Whole pages are freed at once. Everything below `length`, or below `committed`, counts as
        committed from then on. Raises ValueError if fewer than `length` positions are cached.
        """
        sequence = self._sequences.get(seq_id)
        held = 0 if sequence is None else len(sequence.tokens)
        if not 0 <= length <= held:
            raise ValueError(
                f"Sequence {seq_id} cannot be truncated to {length}: {held} positions are cached."
            )
        if sequence is None:
            return
        if length < held or length + self.page_size <= sequence.reserved:
            self._shrink(sequence, length)
        self.commit(seq_id, length if committed is None else committed)

    def commit(self, seq_id: int, length: int) -> None:
        """Record that positions below `length` are committed and computed.

        Sequences that begin with the same tokens find their full pages from then on.
        """
        sequence = self._sequences[seq_id]
        if self.prefix_caching and length // self.page_size > len(sequence.page_hashes):
            self._register_pages(sequence, length // self.page_size)

    def fork(self, seq_id: int, branch_id: int, length: int) -> None:
        """Start `branch_id` as a copy of the first `length` positions.

        Raises OutOfPages; nothing has changed then.
        """
        self.fork_many([Fork(seq_id, branch_id, length)])

    def fork_many(self, forks: Sequence[Fork]) -> None:
        """Fork all or none: full pages are shared, the last partial ones are copied together.

        Raises OutOfPages; nothing has changed then.
        """
        self._check_forks(forks)
        missing = sum(fork.length % self.page_size != 0 for fork in forks)
        if missing > self._allocator.num_free:
            raise OutOfPages(
                f"{missing} more pages are needed for {len(forks)} forks, and "
                f"{self._allocator.num_free} of {self.num_pages} are free."
            )
        copies = [self._fork(fork) for fork in forks]
        self._copy_pages([copy for copy in copies if copy is not None])

    def promote_branch(self, seq_id: int, branch_id: int) -> None:
        """Replace `seq_id` with `branch_id`, and release the pages of the former."""
        self.release(seq_id)
        self._sequences[seq_id] = self._sequences.pop(branch_id)

    def release(self, seq_id: int) -> None:
        """Release all pages of a sequence; unknown ids are allowed.

        Registered pages stay in the prefix cache until their space is needed.
        """
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self.unreported_hits.pop(seq_id, None)
            self._shrink(sequence, 0)
            self._block_table.free_row(sequence.row)

    def attach_prefix(self, seq_id: int, tokens: Sequence[int]) -> int:
        """Attach cached pages that hold the next of these tokens, and return how many tokens.

        At least one token is left to compute, for its logits. Pages are attached only to a sequence
        that is wholly committed; a page that it has begun is replaced by the cached one.
        """
        if not self.prefix_caching:
            return 0
        sequence = self._sequences.get(seq_id)
        whole = 0 if sequence is None else len(sequence.page_hashes) * self.page_size
        begun = [] if sequence is None else sequence.tokens[whole:]
        if sequence is not None and sequence.reserved > whole + bool(begun) * self.page_size:
            return 0
        self.prefix_queries += len(tokens)
        if sequence is None or not sequence.tokens:
            self.unreported_hits.pop(seq_id, None)
        parent = b"" if sequence is None else sequence.last_hash
        found = list(self._find_pages(parent, (*begun, *tokens[:-1])))
        if not found:
            return 0
        if sequence is None:
            sequence = self._add_sequence(seq_id)
        elif begun:
            self._shrink(sequence, whole)
        self._attach(sequence, found, (*begun, *tokens))
        num_found = len(found) * self.page_size - len(begun)
        self.prefix_hits += num_found
        self.unreported_hits[seq_id] = self.unreported_hits.get(seq_id, 0) + num_found
        return num_found

    def slots(self, seq_id: int, start: int, stop: int) -> Tensor:  # [stop - start]
        """Return the slots of `keys` and `values` that hold these positions."""
        sequence = self._sequences[seq_id]
        assert 0 <= start <= stop <= sequence.reserved, "slots that are not reserved"
        pages, offsets = np.divmod(np.arange(start, stop), self.page_size)
        slots = self._block_table.pages[sequence.row, pages] * self.page_size + offsets
        return to_device(slots, self.device)

    def block_table(
        self, seq_ids: Sequence[int], num_pages: int
    ) -> NDArray[np.int64]:  # [seqs, pages]
        """Return a copy of the first pages of each sequence, padded with page 0."""
        self._block_table.widen(num_pages)
        rows = [self._sequences[seq_id].row for seq_id in seq_ids]
        if len(rows) == 1:
            # Looking up a list of rows takes four times as long.
            return self._block_table.pages[rows[0] : rows[0] + 1, :num_pages].copy()
        return self._block_table.pages[rows, :num_pages]

    def check(self) -> None:
        """Assert that pages are counted correctly, and that block table and hashes agree.

        This is slow: for idle moments and tests.
        """
        counts = np.zeros(self.num_pages, dtype=np.int64)
        for sequence in self._sequences.values():
            num_held = self._num_pages(sequence.reserved)
            own, padding = np.split(self._block_table.pages[sequence.row], [num_held])
            assert len(set(own.tolist())) == num_held, "a sequence holds a page twice"
            assert not padding.any(), "a page stands past the end of a sequence"
            assert len(sequence.tokens) <= sequence.reserved, "tokens without room"
            assert len(sequence.page_hashes) <= len(sequence.tokens) // self.page_size, (
                "a hash of a page that is not full"
            )
            hashes = page_hashes(sequence.salt, sequence.tokens, self.page_size)
            assert all(
                known == computed
                for known, computed in zip(sequence.page_hashes, hashes, strict=False)
            ), "a hash is not that of its page's tokens"
            counts[own] += 1
        self._block_table.check([sequence.row for sequence in self._sequences.values()])
        self._allocator.check(counts)

    def _num_pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def _num_missing(self, sequence: _CachedSequence | None, length: int) -> int:
        """Return how many fresh pages a reservation takes, a copy of a shared tail included."""
        if sequence is None:
            return self._num_pages(length)
        if length <= sequence.reserved:
            return 0
        missing = self._num_pages(length) - self._num_pages(sequence.reserved)
        if sequence.reserved % self.page_size and self._allocator.is_shared(self._tail(sequence)):
            missing += 1
        return missing

    def _tail(self, sequence: _CachedSequence) -> int:
        """Return the page in which the reserved room ends, if it ends within a page.

        That page can be shared only after a truncation into it.
        """
        return self._block_table.pages.item(sequence.row, sequence.reserved // self.page_size)

    def _make_tail_writable(self, sequence: _CachedSequence) -> None:
        """Copy the tail page if it is shared (copy on write), or unregister it.

        A page that is only registered is not copied but loses its hash, so that no sequence ever
        needs more pages than its length implies.
        """
        page = self._tail(sequence)
        if self._allocator.is_shared(page):
            own = self._allocator.allocate()
            self._copy_pages([(page, own)])
            self._allocator.release(np.array([page]))
            self._block_table.pages[sequence.row, sequence.reserved // self.page_size] = own
        elif self._allocator.is_registered(page):
            self._allocator.unregister(page)

    def _allocate_pages(self, sequence: _CachedSequence, length: int) -> None:
        num_pages = self._num_pages(length)
        self._block_table.widen(num_pages)
        for index in range(self._num_pages(sequence.reserved), num_pages):
            self._block_table.pages[sequence.row, index] = self._allocator.allocate()

    def _shrink(self, sequence: _CachedSequence, length: int) -> None:
        keep, held = self._num_pages(length), self._num_pages(sequence.reserved)
        del sequence.tokens[length:]
        sequence.reserved = length
        if len(sequence.page_hashes) * self.page_size > length:
            del sequence.page_hashes[length // self.page_size :]
        if keep < held:
            dropped = self._block_table.pages[sequence.row, keep:held]
            self._allocator.release(dropped)
            dropped[:] = 0

    def _register_pages(self, sequence: _CachedSequence, num_full: int) -> None:
        known = len(sequence.page_hashes)
        tokens = sequence.tokens[known * self.page_size : num_full * self.page_size]
        hashes = page_hashes(sequence.last_hash, tokens, self.page_size)
        for index, page_hash in enumerate(hashes, known):
            page = self._block_table.pages.item(sequence.row, index)
            self._allocator.register(page, page_hash)
            sequence.page_hashes.append(page_hash)

    def _find_pages(self, parent: bytes, tokens: Sequence[int]) -> Iterator[tuple[bytes, int]]:
        """Yield hash and page of each full page of `tokens`, up to the first that is not cached."""
        for page_hash in page_hashes(parent, array("q", tokens), self.page_size):
            page = self._allocator.find(page_hash)
            if page is None:
                return
            yield page_hash, page

    def _attach(
        self,
        sequence: _CachedSequence,
        found: Sequence[tuple[bytes, int]],
        tokens: Sequence[int],
    ) -> None:
        held = len(sequence.page_hashes)
        pages = np.array([page for _, page in found], dtype=np.int64)
        self._block_table.widen(held + len(found))
        self._block_table.pages[sequence.row, held : held + len(found)] = pages
        self._allocator.share(pages)
        sequence.page_hashes.extend(page_hash for page_hash, _ in found)
        sequence.tokens.extend(tokens[: len(found) * self.page_size])
        sequence.reserved = len(sequence.tokens)

    def _check_forks(self, forks: Sequence[Fork]) -> None:
        """Raise ValueError for forks that cannot be made, before anything changes.

        A fork of a fork in the same call is refused too: its page would be copied before it is
        filled.
        """
        fresh = {fork.branch_id for fork in forks}
        if len(fresh) < len(forks) or not fresh.isdisjoint(self._sequences):
            raise ValueError("A fork must become a sequence that is not cached yet.")
        for fork in forks:
            if not 0 <= fork.length <= self.length(fork.seq_id):
                raise ValueError(
                    f"Sequence {fork.seq_id} cannot be forked at {fork.length}: "
                    f"{self.length(fork.seq_id)} positions are cached."
                )

    def _fork(self, fork: Fork) -> tuple[int, int] | None:
        """Make a fork except for the contents of its partial page.

        Returns the page to copy and the page to copy it to; None if the fork has no partial page.
        """
        copy = self._add_sequence(fork.branch_id)
        original = self._sequences.get(fork.seq_id)
        if original is None or fork.length == 0:
            return None
        full = fork.length // self.page_size
        copy.reserved, copy.tokens, copy.page_hashes, copy.salt = (
            fork.length,
            original.tokens[: fork.length],
            original.page_hashes[:full],
            original.salt,
        )
        pages = self._block_table.pages
        shared = pages[original.row, :full]
        pages[copy.row, :full] = shared
        self._allocator.share(shared)
        if full * self.page_size == fork.length:
            return None
        pages[copy.row, full] = self._allocator.allocate()
        return pages.item(original.row, full), pages.item(copy.row, full)

    @torch.inference_mode()
    def _copy_pages(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy the contents of pages (from, to), in all layers at once."""
        if pages:
            sources, targets = to_device(np.array(pages), self.device).unbind(1)
            for pool in self._pools:
                pool.index_copy_(1, targets, pool.index_select(1, sources))

    def _add_sequence(self, seq_id: int) -> _CachedSequence:
        sequence = self._sequences[seq_id] = _CachedSequence(self._block_table.add_row())
        return sequence


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, not uninitialised memory, which padding reads: a NaN spoils masked sums, too.

    Much memory of a host is claimed once models are open.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and num_bytes >= CLAIMED_LATER:
        memory = ClaimedMemory.reserve(num_bytes)
        if memory is not None:
            return torch.frombuffer(memory, dtype=dtype).view(shape)
    return torch.zeros(*shape, dtype=dtype, device=device)
