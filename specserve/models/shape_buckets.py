"""Sizes to which the shapes of products are rounded up, so that few different shapes occur.

oneDNN compiles a kernel for each shape that it meets: that takes a millisecond of a pass, and
0.6 MiB that it keeps.
"""

from __future__ import annotations


def bucket_size(size: int, *, exact: int = 16) -> int:
    """Return the smallest bucket that holds `size`.

    Up to `exact`, a power of two, every number is a bucket. Beyond it, `exact / 2` buckets lie
    between one power of two and the next.
    """
    if size <= exact:
        return size
    step = (1 << (size - 1).bit_length()) // exact
    return -(-size // step) * step
