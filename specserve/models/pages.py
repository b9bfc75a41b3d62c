"""Who holds which page: counts, fresh pages, full pages kept for their contents, and the table of them all. Knows no tensors."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


class Pages:
    """Every page is held (counted), free, or kept: named by its contents and held by nobody, until room is needed."""

    __slots__ = ("_counts", "_free", "_kept", "_names", "_pages", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._counts = np.zeros(num_pages, dtype=np.int64)  # [pages] holders of each
        self._free = list(range(num_pages - 1, -1, -1))  # without a name; the last is taken first
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._names: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}  # the inverse

    @property
    def num_free(self) -> int:
        """Pages that can be taken; kept ones count, since they go when they are needed."""
        return len(self._free) + len(self._kept)

    def take(self) -> int:
        """A page of one's own. Its old contents lose their name."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            self.forget(page)
        self._counts[page] = 1
        return page

    def share(self, pages: NDArray[np.int64]) -> None:
        """One more holder for each of these distinct pages."""
        for page in pages[self._counts[pages] == 0].tolist():
            del self._kept[page]
        self._counts[pages] += 1

    def drop(self, pages: NDArray[np.int64]) -> None:
        """One holder fewer for each. The deepest page of a prefix becomes the oldest: a prefix is evicted from its end."""
        self._counts[pages] -= 1
        for page in pages[self._counts[pages] == 0][::-1].tolist():
            if page in self._names:
                self._kept[page] = None
            else:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        return self._counts.item(page) > 1

    def is_named(self, page: int) -> bool:
        return page in self._names

    def name(self, page: int, contents: bytes) -> None:
        """Let others find this held page by its contents. If another page has the same contents, that one stays the one found."""
        if contents not in self._pages:
            self._pages[contents] = page
            self._names[page] = contents

    def forget(self, page: int) -> None:
        del self._pages[self._names.pop(page)]

    def find(self, contents: bytes) -> int | None:
        return self._pages.get(contents)

    def check(self, counts: NDArray[np.int64]) -> None:
        """Assert that pages are held as often as `counts` says and that none is both held and free, or neither."""
        assert (self._counts == counts).all(), "a page is not held as often as it is counted"
        unheld = sorted([*self._free, *self._kept])
        assert unheld == np.flatnonzero(counts == 0).tolist(), (
            "a page is both held and free, free twice, or lost"
        )
        assert not any(page in self._names for page in self._free), "a free page has a name"
        assert all(page in self._names for page in self._kept), "a page is kept without a name"
        assert {name: page for page, name in self._names.items()} == self._pages, (
            "names and pages disagree"
        )


def page_names(parent: bytes, tokens: array[int], page_size: int) -> Iterator[bytes]:
    """Names of the full pages of tokens behind a page named `parent`, each made of all tokens up to its end.

    Cryptographic hashes, so that no client can craft a prompt that hits another's pages.
    """
    for start in range(0, len(tokens) - page_size + 1, page_size):
        parent = blake2b(
            parent + tokens[start : start + page_size].tobytes(), digest_size=16
        ).digest()
        yield parent


class PageTable:
    """A matrix with a row of pages for each sequence, 0 where it has none, so that a whole batch is looked up at once."""

    __slots__ = ("_free_rows", "pages")

    def __init__(self) -> None:
        self.pages = np.zeros((0, 0), dtype=np.int64)  # [rows, widest]; replaced when it grows
        self._free_rows: list[int] = []

    def open(self) -> int:
        """A row of zeros; there are always more."""
        if not self._free_rows:
            rows, width = self.pages.shape
            self.pages = np.concatenate(
                [self.pages, np.zeros((max(rows, 16), width), dtype=np.int64)]
            )
            self._free_rows.extend(range(len(self.pages) - 1, rows - 1, -1))
        return self._free_rows.pop()

    def close(self, row: int) -> None:
        """The caller has cleared it."""
        self._free_rows.append(row)

    def widen(self, pages: int) -> None:
        """Let rows hold so many pages; by doubling, so that it seldom happens."""
        rows, width = self.pages.shape
        if pages > width:
            self.pages = np.concatenate(
                [self.pages, np.zeros((rows, max(pages - width, width)), dtype=np.int64)], axis=1
            )

    def check(self, open_rows: Sequence[int]) -> None:
        assert sorted([*open_rows, *self._free_rows]) == list(range(len(self.pages))), (
            "a row is both open and free, or lost"
        )
        assert not self.pages[self._free_rows].any(), "a free row holds pages"
