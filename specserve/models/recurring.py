"""Numbers of rows that recur. oneDNN compiles a kernel for each shape that it meets: a millisecond of a pass, and 0.7 MiB that it keeps."""

from __future__ import annotations

EVERY = 16  # up to here each number; beyond, eight between one power of two and the next


def recurring(rows: int) -> int:
    """The next one of them."""
    if rows <= EVERY:
        return rows
    step = 1 << ((rows - 1).bit_length() - 4)
    return -(-rows // step) * step
