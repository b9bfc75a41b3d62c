"""Copy pages of a prefix cache to bytes, and bytes of another engine's into it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specserve.errors import BadValue
from specserve.models.cache import PagedCache
from specserve.page_transfers import MAX_MESSAGE_BYTES, PageAnswer, PageData, PageTransfer
from specserve.transfers import to_device


def page_bytes(cache: PagedCache) -> int:
    """Return the bytes of one page, in all layers."""
    return sum(_part_bytes(pool) for pool in cache.pools)


def exchange(
    cache: PagedCache, transfers: Sequence[PageTransfer], *, max_bytes: int = MAX_MESSAGE_BYTES
) -> tuple[PageAnswer, ...]:
    """Answer questions about pages, and import those that have come.

    Call it between two passes. All answers together have `max_bytes`, or one page if that is more.
    """
    left, answers = max(1, max_bytes // page_bytes(cache)), []
    for transfer in transfers:
        if isinstance(transfer, PageData):
            answers.append(PageAnswer(import_pages(cache, transfer)))
            continue
        found = cache.find_pages(transfer.hashes)
        sent = found[:left] if transfer.wants_data else []
        left -= len(sent)
        answers.append(PageAnswer(len(found), export_pages(cache, sent)))
    return tuple(answers)


@torch.inference_mode()
def export_pages(cache: PagedCache, pages: Sequence[int]) -> bytes:
    """Return the contents of these pages, one page after the other."""
    if not pages:
        return b""
    where = to_device(np.array(pages, dtype=np.int64), cache.device)
    parts = [_as_bytes(pool.index_select(1, where).transpose(0, 1)) for pool in cache.pools]
    return torch.cat(parts, dim=1).cpu().numpy().tobytes()


@torch.inference_mode()
def import_pages(cache: PagedCache, received: PageData) -> int:
    """Write pages into the prefix cache, and return how many of them are found there now.

    Pages that are there already stay. When there is no room for more, the last ones are left out.
    Raises BadValue for contents of another size.
    """
    if len(received.data) != len(received.hashes) * page_bytes(cache):
        raise BadValue("pages of another size than this cache's were sent")
    adopted = cache.adopt_pages(received.hashes)
    if adopted:
        rows = torch.frombuffer(bytearray(received.data), dtype=torch.uint8)
        rows = rows.view(len(received.hashes), -1)[[index for index, _ in adopted]]
        where = to_device(np.array([page for _, page in adopted], dtype=np.int64), cache.device)
        rows, first = rows.to(cache.device), 0
        for pool in cache.pools:
            stop = first + _part_bytes(pool)
            part = rows[:, first:stop].contiguous().view(pool.dtype)
            shape = (len(adopted), len(pool), *pool.shape[2:])
            pool.index_copy_(1, where, part.view(shape).transpose(0, 1))
            first = stop
        cache.release_adopted([page for _, page in adopted])
    return len(cache.find_pages(received.hashes))


def _part_bytes(pool: Tensor) -> int:
    """Return a page's bytes in one pool [layers, pages, ...]."""
    return len(pool) * math.prod(pool.shape[2:]) * pool.element_size()


def _as_bytes(pages: Tensor) -> Tensor:  # [pages, layers, ...] -> [pages, bytes]
    return pages.contiguous().view(len(pages), -1).view(torch.uint8)
