"""Zeroed memory that is there at once, and that a thread claims from the system meanwhile.

The system gives memory when it is first written to. A cache of keys and values may be half of what
is free: writing all of it took a third of a start. If it were claimed only as sequences fill it,
who asks for free memory later would take it twice.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from contextlib import suppress
from threading import Thread, get_native_id
from typing import ClassVar

HUGE_PAGE = 2**21
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23  # of madvise(2)
NICENESS = 10


class ClaimedMemory(mmap.mmap):
    """Zeros; those not yet claimed are counted. The claim ends with the last reference."""

    unclaimed: int
    _living: ClassVar[weakref.WeakSet[ClaimedMemory]] = weakref.WeakSet()

    def __new__(cls, num_bytes: int) -> ClaimedMemory:
        memory = super().__new__(cls, -1, num_bytes)
        memory.unclaimed = 0
        return memory

    def claim(self) -> bool:
        """Begin to claim all of it; return False where the system (Linux before 5.14) cannot."""
        first = ctypes.c_char.from_buffer(self)
        address, num_bytes = ctypes.addressof(first), len(self)
        madvise(address, num_bytes, MADV_HUGEPAGE)
        if not madvise(address, min(HUGE_PAGE, num_bytes), MADV_POPULATE_WRITE):
            return False
        self.unclaimed = num_bytes
        self._living.add(self)
        Thread(
            target=_claim, args=(weakref.ref(self), address, num_bytes), name="claim", daemon=True
        ).start()
        return True

    @classmethod
    def num_unclaimed(cls) -> int:
        """Return the bytes that this process has promised itself and the system still counts."""
        return sum(memory.unclaimed for memory in tuple(cls._living))


def _claim(reference: weakref.ref[ClaimedMemory], address: int, num_bytes: int) -> None:
    """Claim memory in steps; where processors are busy, with a tenth of one."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, get_native_id(), NICENESS)  # of this thread alone
    for start in range(0, num_bytes, HUGE_PAGE):
        memory = reference()
        if memory is None:
            return
        left = num_bytes - start
        is_there = madvise(address + start, min(HUGE_PAGE, left), MADV_POPULATE_WRITE)
        memory.unclaimed = max(0, left - HUGE_PAGE) if is_there else 0
        del memory  # before the next step, which ends here if nothing else refers to it
        if not is_there:
            return


def madvise(address: int, num_bytes: int, advice: int) -> bool:
    """Give Linux advice about memory; return whether it was taken, nowhere else."""
    call = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform.startswith("linux") else None
    if call is None:
        return False
    given = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice)
    return bool(call(*given) == 0)
