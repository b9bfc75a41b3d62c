"""Sizes to which the shapes of products are rounded up or cut, so that few different ones occur.

oneDNN compiles a kernel for each shape that it meets: that takes a millisecond of a pass, and
0.6 MiB that it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

QUERY_PIECES = (*range(1, 17), 32, 64, 128, 256, 512)
"""Queries of a sequence that attend in one product."""
BATCH_PIECES = (*range(1, 9), 12, 16, 24, 32, 48, 64)
"""Products of attention in one batch, in multiples of the number of key heads."""


def bucket_size(size: int, *, exact: int = 16) -> int:
    """Return the smallest bucket that holds `size`.

    Up to `exact`, a power of two, every number is a bucket. Beyond it, `exact / 2` buckets lie
    between one power of two and the next.
    """
    if size <= exact:
        return size
    step = (1 << (size - 1).bit_length()) // exact
    return -(-size // step) * step


@cache
def pieces(size: int, sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return ranges (start, stop) that make up `size`, each as long as possible, from `sizes`."""
    ranges, start = [], 0
    for piece in reversed(sizes):
        while size - start >= piece:
            ranges.append((start, start + piece))
            start += piece
    return tuple(ranges)
