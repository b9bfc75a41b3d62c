"""Count the holders of each KV cache page, find full pages by hash, and keep the block table.

Knows no tensors.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


class PageAllocator:
    """The state of every page: held (and counted), free, or evictable.

    An evictable page has no holder, but stays registered by its hash until its space is needed.
    """

    __slots__ = ("_by_hash", "_counts", "_evictable", "_free", "_hashes", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._counts = np.zeros(num_pages, dtype=np.int64)  # [pages] holders of each
        # Free pages have no hash; the last is allocated first.
        self._free = list(range(num_pages - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hashes: dict[int, bytes] = {}
        self._by_hash: dict[bytes, int] = {}  # the inverse

    @property
    def num_free(self) -> int:
        """Number of pages that can be allocated, evictable ones included."""
        return len(self._free) + len(self._evictable)

    def allocate(self) -> int:
        """Return a page with one holder, evicting the least recently used page if none is free."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._evictable.popitem(last=False)
            self.unregister(page)
        self._counts[page] = 1
        return page

    def share(self, pages: NDArray[np.int64]) -> None:
        """Add one holder to each of these distinct pages."""
        for page in pages[self._counts[pages] == 0].tolist():
            del self._evictable[page]
        self._counts[pages] += 1

    def release(self, pages: NDArray[np.int64]) -> None:
        """Remove one holder from each page.

        The deepest page of a prefix becomes the oldest, so that a prefix is evicted from its end.
        """
        self._counts[pages] -= 1
        for page in pages[self._counts[pages] == 0][::-1].tolist():
            if page in self._hashes:
                self._evictable[page] = None
            else:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        return self._counts.item(page) > 1

    def is_registered(self, page: int) -> bool:
        return page in self._hashes

    def register(self, page: int, page_hash: bytes) -> None:
        """Let others find this held page by the hash of its contents.

        If another page is registered by that hash already, that one stays the one that is found.
        """
        if page_hash not in self._by_hash:
            self._by_hash[page_hash] = page
            self._hashes[page] = page_hash

    def unregister(self, page: int) -> None:
        """Make a page impossible to find by its hash, because its contents will change."""
        del self._by_hash[self._hashes.pop(page)]

    def find(self, page_hash: bytes) -> int | None:
        """Return the page with these contents; None if there is none."""
        return self._by_hash.get(page_hash)

    def check(self, counts: NDArray[np.int64]) -> None:
        """Assert that pages have `counts` holders and that each is either held or free."""
        assert (self._counts == counts).all(), "a page is not held as often as it is counted"
        unheld = sorted([*self._free, *self._evictable])
        assert unheld == np.flatnonzero(counts == 0).tolist(), (
            "a page is both held and free, free twice, or lost"
        )
        assert not any(page in self._hashes for page in self._free), "a free page has a hash"
        assert all(page in self._hashes for page in self._evictable), (
            "a page is evictable without a hash"
        )
        assert {page_hash: page for page, page_hash in self._hashes.items()} == self._by_hash, (
            "hashes and pages disagree"
        )


def page_hashes(parent: bytes, tokens: array[int], page_size: int) -> Iterator[bytes]:
    """Yield the hash of each full page of `tokens`, which follow a page with the hash `parent`.

    Each hash covers all tokens up to the end of its page. The hashes are cryptographic, so that no
    client can craft a prompt that hits another client's pages.
    """
    for start in range(0, len(tokens) - page_size + 1, page_size):
        parent = blake2b(
            parent + tokens[start : start + page_size].tobytes(), digest_size=16
        ).digest()
        yield parent


class BlockTable:
    """The pages of all sequences as one matrix, so that a whole batch is looked up at once.

    Each sequence has a row; entries past its last page are 0.
    """

    __slots__ = ("_free_rows", "pages")

    def __init__(self) -> None:
        self.pages = np.zeros((0, 0), dtype=np.int64)  # [rows, widest]; replaced when it grows
        self._free_rows: list[int] = []

    def add_row(self) -> int:
        """Return a row of zeros, growing the matrix if all rows are taken."""
        if not self._free_rows:
            rows, width = self.pages.shape
            self.pages = np.concatenate(
                [self.pages, np.zeros((max(rows, 16), width), dtype=np.int64)]
            )
            self._free_rows.extend(range(len(self.pages) - 1, rows - 1, -1))
        return self._free_rows.pop()

    def free_row(self, row: int) -> None:
        """Give back a row that the caller has set to zeros."""
        self._free_rows.append(row)

    def widen(self, num_pages: int) -> None:
        """Make rows wide enough for `num_pages`. The width doubles, so that it seldom grows."""
        rows, width = self.pages.shape
        if num_pages > width:
            self.pages = np.concatenate(
                [self.pages, np.zeros((rows, max(num_pages - width, width)), dtype=np.int64)],
                axis=1,
            )

    def check(self, open_rows: Sequence[int]) -> None:
        """Assert that `open_rows` are all rows in use, and that the others are zeros."""
        assert sorted([*open_rows, *self._free_rows]) == list(range(len(self.pages))), (
            "a row is both open and free, or lost"
        )
        assert not self.pages[self._free_rows].any(), "a free row holds pages"
