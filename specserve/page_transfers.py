"""Pages of KV caches on their way from engine to engine: what ranks are asked, and their answers.

Pages are known by the hash of their tokens and those before. Knows no tensors and no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

HASH_BYTES = 16
MAX_MESSAGE_BYTES = 32 * 2**20
"""Bytes of pages in one message to or from a rank, or one page. It bounds memory, not time.

How long a round may wait for pages is decided in `cluster/import_budget.py`.
"""


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Question which pages of a prefix a rank has cached: those from the first hash on."""

    hashes: tuple[bytes, ...]
    wants_data: bool = False


@dataclass(frozen=True, slots=True)
class PageData:
    """Contents of consecutive pages of a prefix, for the prefix cache of a rank."""

    hashes: tuple[bytes, ...]
    data: bytes | memoryview  # equally many bytes of each page


PageTransfer = PageQuery | PageData


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """Number of pages that the rank has, from the first hash on, and the contents of the first."""

    num_pages: int
    data: bytes | memoryview = b""
