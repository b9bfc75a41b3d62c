"""Pages of keys and values, the same for target and draft: reserve, append, truncate, fork, release. Knows no model.

What lies below a truncation is committed. Full committed pages are named by a hash chained over all their prefix's tokens, and
another sequence that starts with the same tokens attaches them instead of computing them. Drafts are never named.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.errors import OutOfPages
from specserve.models.pages import Pages, PageTable, page_names


@dataclass(frozen=True, slots=True)
class Fork:
    """`as_id` shall be a copy of the first `length` positions of `seq_id`."""

    seq_id: int
    as_id: int
    length: int


class _Sequence:
    """What is cached of one sequence. Its pages stand in row `row` of the cache's table, enough of them for `reserved`."""

    __slots__ = ("names", "reserved", "row", "tokens")

    def __init__(self, row: int) -> None:
        self.row = row
        self.reserved = 0  # at least the length; the room past it belongs to nobody else
        self.tokens = array("q")  # the length is theirs
        self.names: list[bytes] = []  # of the full pages that are known to be committed

    @property
    def last_name(self) -> bytes:
        return self.names[-1] if self.names else b""


class PagedCache:
    """Slot `page * page_size + offset` of every layer's `keys` and `values` holds one position of one sequence.

    A page that others hold too, or find by its name, is never written: `reserve` copies it or takes its name away first.
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
    ) -> None:
        self.kv_heads, self.num_pages, self.page_size = kv_heads, num_pages, page_size
        self.device, self.prefix_caching = torch.device(device), prefix_caching
        self.prefix_queries = 0  # tokens that were looked for
        self.prefix_hits = 0  # tokens that were found
        # Zeros, not empty: padding reads slots that nobody has written, and a masked NaN would still spoil the sum.
        shape = (num_layers, num_pages, page_size, kv_heads)
        self._pools = [
            torch.zeros(*shape, dim, dtype=dtype, device=self.device)
            for dim in (head_dim, v_head_dim or head_dim)
        ]
        self.keys, self.values = (
            list(pool.flatten(1, 2).unbind(0)) for pool in self._pools
        )  # each [slots, kv_heads, dim]
        self._pages = Pages(num_pages)
        self._sequences: dict[int, _Sequence] = {}
        self._table = PageTable()

    @property
    def num_free(self) -> int:
        """Pages that a reservation can get, those that are only kept for their contents included."""
        return self._pages.num_free

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def length(self, seq_id: int) -> int:
        sequence = self._sequences.get(seq_id)
        return 0 if sequence is None else len(sequence.tokens)

    def tokens(self, seq_id: int) -> NDArray[np.int64]:
        """What is cached, as token ids; a copy."""
        return np.array(self._sequences[seq_id].tokens, dtype=np.int64)

    def holds(self, seq_id: int, start: int, tokens: Sequence[int]) -> bool:
        """Whether these tokens are cached from `start` on."""
        sequence = self._sequences.get(seq_id)
        return sequence is not None and sequence.tokens[start : start + len(tokens)] == array(
            "q", tokens
        )

    def can_reserve(self, seq_id: int, length: int) -> bool:
        return self._lacking(self._sequences.get(seq_id), length) <= self._pages.num_free

    def reserve(self, seq_id: int, length: int) -> None:
        """Make room up to `length`, all of it this sequence's own. Raises OutOfPages; nothing changed then."""
        sequence = self._sequences.get(seq_id)
        lacking = self._lacking(sequence, length)
        if lacking > self._pages.num_free:
            raise OutOfPages(
                f"{lacking} more pages are needed for {length} positions, and {self._pages.num_free} of {self.num_pages} are free."
            )
        if sequence is None:
            sequence = self._open(seq_id)
        if length <= sequence.reserved:
            return
        if sequence.reserved % self.page_size:
            self._own_tail(sequence)
        if lacking:
            self._extend(sequence, length)
        sequence.reserved = length

    def append(self, seq_id: int, tokens: Sequence[int]) -> None:
        """These tokens' keys and values are about to be written; there is room reserved for them."""
        sequence = self._sequences[seq_id]
        assert len(sequence.tokens) + len(tokens) <= sequence.reserved, "append without reserve"
        sequence.tokens.extend(tokens)

    def truncate(self, seq_id: int, length: int) -> None:
        """Drop what lies past `length`, whole pages at once. What lies below it is thereby declared committed."""
        sequence = self._sequences.get(seq_id)
        held = 0 if sequence is None else len(sequence.tokens)
        if not 0 <= length <= held:
            raise ValueError(
                f"Sequence {seq_id} cannot be truncated to {length}: {held} positions are cached."
            )
        if sequence is None:
            return
        if length < sequence.reserved:
            self._cut(sequence, length)
        if self.prefix_caching and length // self.page_size > len(sequence.names):
            self._name_pages(sequence, length // self.page_size)

    def fork(self, seq_id: int, as_id: int, length: int) -> None:
        """Start `as_id` as a copy of the first `length` positions. Raises OutOfPages; nothing changed then."""
        self.fork_many([Fork(seq_id, as_id, length)])

    def fork_many(self, forks: Sequence[Fork]) -> None:
        """Fork all or none: full pages are shared, the last partial ones are copied together. Raises OutOfPages."""
        self._check_forks(forks)
        lacking = sum(fork.length % self.page_size != 0 for fork in forks)
        if lacking > self._pages.num_free:
            raise OutOfPages(
                f"{lacking} more pages are needed for {len(forks)} forks, and {self._pages.num_free} of {self.num_pages} are free."
            )
        copies = [self._fork(fork) for fork in forks]
        self._copy([copy for copy in copies if copy is not None])

    def become(self, seq_id: int, other_id: int) -> None:
        """`other_id` takes the place of `seq_id`, whose pages are given back."""
        self.release(seq_id)
        self._sequences[seq_id] = self._sequences.pop(other_id)

    def release(self, seq_id: int) -> None:
        """Give everything back; its named pages are kept until the room is needed. Unknown ids are fine."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self._cut(sequence, 0)
            self._table.close(sequence.row)

    def match(self, seq_id: int, tokens: Sequence[int]) -> int:
        """Attach cached pages that continue a wholly committed sequence with these tokens; how many tokens they are.

        At least one token is left to compute, for its logits. Nothing is attached to a sequence that ends within a page.
        """
        if not self.prefix_caching:
            return 0
        sequence = self._sequences.get(seq_id)
        if (
            sequence is not None
            and not sequence.reserved
            == len(sequence.tokens)
            == len(sequence.names) * self.page_size
        ):
            return 0
        self.prefix_queries += len(tokens)
        found = list(self._known(b"" if sequence is None else sequence.last_name, tokens[:-1]))
        if not found:
            return 0
        self._attach(sequence or self._open(seq_id), found, tokens)
        self.prefix_hits += len(found) * self.page_size
        return len(found) * self.page_size

    def slots(self, seq_id: int, start: int, stop: int) -> Tensor:  # [stop - start]
        """Where those positions live in `keys` and `values`."""
        sequence = self._sequences[seq_id]
        assert 0 <= start <= stop <= sequence.reserved, "slots that are not reserved"
        pages, offsets = np.divmod(np.arange(start, stop), self.page_size)
        return torch.from_numpy(
            self._table.pages[sequence.row, pages] * self.page_size + offsets
        ).to(self.device)

    def table(self, seq_ids: Sequence[int], pages: int) -> NDArray[np.int64]:  # [seqs, pages]
        """The first pages of each sequence, padded with page 0; a copy."""
        self._table.widen(pages)
        rows = [self._sequences[seq_id].row for seq_id in seq_ids]
        if len(rows) == 1:
            return self._table.pages[
                rows[0] : rows[0] + 1, :pages
            ].copy()  # looking up a list of rows takes four times as long
        return self._table.pages[rows, :pages]

    def check(self) -> None:
        """Assert that every page is held as often as it is counted and that tables and names agree. For idle moments and tests."""
        counts = np.zeros(self.num_pages, dtype=np.int64)
        for sequence in self._sequences.values():
            num_held = self._num_pages(sequence.reserved)
            own, padding = np.split(self._table.pages[sequence.row], [num_held])
            assert len(set(own.tolist())) == num_held, "a sequence holds a page twice"
            assert not padding.any(), "a page stands past the end of a sequence"
            assert len(sequence.tokens) <= sequence.reserved, "tokens without room"
            assert len(sequence.names) <= len(sequence.tokens) // self.page_size, (
                "a name of a page that is not full"
            )
            names = page_names(b"", sequence.tokens, self.page_size)
            assert all(known == name for known, name in zip(sequence.names, names, strict=False)), (
                "a name is not that of its page's tokens"
            )
            counts[own] += 1
        self._table.check([sequence.row for sequence in self._sequences.values()])
        self._pages.check(counts)

    def _num_pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def _lacking(self, sequence: _Sequence | None, length: int) -> int:
        """Fresh pages that a reservation takes: those past the end, and one to copy a shared last page to."""
        if sequence is None:
            return self._num_pages(length)
        if length <= sequence.reserved:
            return 0
        missing = self._num_pages(length) - self._num_pages(sequence.reserved)
        if sequence.reserved % self.page_size and self._pages.is_shared(self._tail(sequence)):
            missing += 1
        return missing

    def _tail(self, sequence: _Sequence) -> int:
        """The page in which the reserved room ends; only when it ends within one. It is shared after a cut into it, not else."""
        return self._table.pages.item(sequence.row, sequence.reserved // self.page_size)

    def _own_tail(self, sequence: _Sequence) -> None:
        """Copy on write. A page that only has a name is not copied but loses it: so nobody ever needs more pages than its length."""
        page = self._tail(sequence)
        if self._pages.is_shared(page):
            own = self._pages.take()
            self._copy([(page, own)])
            self._pages.drop(np.array([page]))
            self._table.pages[sequence.row, sequence.reserved // self.page_size] = own
        elif self._pages.is_named(page):
            self._pages.forget(page)

    def _extend(self, sequence: _Sequence, length: int) -> None:
        wanted = self._num_pages(length)
        self._table.widen(wanted)
        for index in range(self._num_pages(sequence.reserved), wanted):
            self._table.pages[sequence.row, index] = self._pages.take()

    def _cut(self, sequence: _Sequence, length: int) -> None:
        keep, held = self._num_pages(length), self._num_pages(sequence.reserved)
        del sequence.tokens[length:]
        sequence.reserved = length
        if len(sequence.names) * self.page_size > length:
            del sequence.names[length // self.page_size :]
        if keep < held:
            dropped = self._table.pages[sequence.row, keep:held]
            self._pages.drop(dropped)
            dropped[:] = 0

    def _name_pages(self, sequence: _Sequence, num_full: int) -> None:
        named = len(sequence.names)
        tokens = sequence.tokens[named * self.page_size : num_full * self.page_size]
        for index, name in enumerate(page_names(sequence.last_name, tokens, self.page_size), named):
            self._pages.name(self._table.pages.item(sequence.row, index), name)
            sequence.names.append(name)

    def _known(self, parent: bytes, tokens: Sequence[int]) -> Iterator[tuple[bytes, int]]:
        """Name and page of each next full page of `tokens`, as long as there is one."""
        for name in page_names(parent, array("q", tokens), self.page_size):
            page = self._pages.find(name)
            if page is None:
                return
            yield name, page

    def _attach(
        self, sequence: _Sequence, found: Sequence[tuple[bytes, int]], tokens: Sequence[int]
    ) -> None:
        held = len(sequence.names)
        pages = np.array([page for _, page in found], dtype=np.int64)
        self._table.widen(held + len(found))
        self._table.pages[sequence.row, held : held + len(found)] = pages
        self._pages.share(pages)
        sequence.names.extend(name for name, _ in found)
        sequence.tokens.extend(tokens[: len(found) * self.page_size])
        sequence.reserved = len(sequence.tokens)

    def _check_forks(self, forks: Sequence[Fork]) -> None:
        """Before anything changes. A fork of a fork in the same call is refused too: its page would be copied before it is filled."""
        fresh = {fork.as_id for fork in forks}
        if len(fresh) < len(forks) or not fresh.isdisjoint(self._sequences):
            raise ValueError("A fork must become a sequence that is not cached yet.")
        for fork in forks:
            if not 0 <= fork.length <= self.length(fork.seq_id):
                raise ValueError(
                    f"Sequence {fork.seq_id} cannot be forked at {fork.length}: {self.length(fork.seq_id)} positions are cached."
                )

    def _fork(self, fork: Fork) -> tuple[int, int] | None:
        """All of a fork but the contents of its partial page; which page is to be copied where."""
        copy = self._open(fork.as_id)
        source = self._sequences.get(fork.seq_id)
        if source is None or fork.length == 0:
            return None
        full = fork.length // self.page_size
        copy.reserved, copy.tokens, copy.names = (
            fork.length,
            source.tokens[: fork.length],
            source.names[:full],
        )
        shared = self._table.pages[source.row, :full]
        self._table.pages[copy.row, :full] = shared
        self._pages.share(shared)
        if full * self.page_size == fork.length:
            return None
        self._table.pages[copy.row, full] = self._pages.take()
        return self._table.pages.item(source.row, full), self._table.pages.item(copy.row, full)

    @torch.inference_mode()
    def _copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """Contents of pages to pages, all layers at once."""
        if pages:
            sources, targets = torch.tensor(pages, device=self.device).unbind(1)
            for pool in self._pools:
                pool.index_copy_(1, targets, pool.index_select(1, sources))

    def _open(self, seq_id: int) -> _Sequence:
        sequence = self._sequences[seq_id] = _Sequence(self._table.open())
        return sequence
