"""Zeroed memory that is there at once, and that a thread claims from the system later.

The system gives memory when it is first written to. A cache of keys and values may be half of what
is free: writing all of it took a third of a start. If it were claimed only as sequences fill it,
who asks for free memory later would take it twice.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread, get_native_id
from typing import ClassVar

HUGE_PAGE = 2**21
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23  # of madvise(2)
NICENESS, PAUSES = 10, 3
"""Of the thread that claims: its priority, and how long it rests after a step, by that step's time.

Passes that are under way meanwhile have a team of threads on all processors.
"""


class ClaimedMemory(mmap.mmap):
    """Zeros, of which those not yet claimed are counted. A claim ends with the last reference."""

    unclaimed: int
    _address: int
    _has_claimant: bool
    _living: ClassVar[weakref.WeakSet[ClaimedMemory]] = weakref.WeakSet()

    @classmethod
    def reserve(cls, num_bytes: int) -> ClaimedMemory | None:
        """Return memory for `claim_all`; None where the system (Linux before 5.14) claims none."""
        memory = cls(-1, num_bytes)
        memory.unclaimed, memory._has_claimant = num_bytes, False
        memory._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        madvise(memory._address, num_bytes, MADV_HUGEPAGE)
        if not memory.claim_some():
            return None
        cls._living.add(memory)
        return memory

    @classmethod
    def claim_all(cls) -> None:
        """Begin to claim what this process has reserved, now that no more passes are timed."""
        waiting = [memory for memory in cls._living if not memory._has_claimant]
        for memory in waiting:
            memory._has_claimant = True
        if waiting:
            references = [weakref.ref(memory) for memory in waiting]
            Thread(target=_claim, args=(references,), name="claim", daemon=True).start()

    @classmethod
    def num_unclaimed(cls) -> int:
        """Return the bytes that this process has reserved and the system still counts as free."""
        return sum(memory.unclaimed for memory in tuple(cls._living))

    def claim_some(self) -> bool:
        """Claim the next part; return whether the system gave it."""
        start, num_bytes = len(self) - self.unclaimed, min(HUGE_PAGE, self.unclaimed)
        is_there = madvise(self._address + start, num_bytes, MADV_POPULATE_WRITE)
        self.unclaimed = self.unclaimed - num_bytes if is_there else 0
        return is_there


def _claim(references: Sequence[weakref.ref[ClaimedMemory]]) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, get_native_id(), NICENESS)  # of this thread alone
    for reference in references:
        while (memory := reference()) is not None and memory.unclaimed:
            start = time.perf_counter()
            memory.claim_some()
            del memory  # which nothing else may refer to
            time.sleep(PAUSES * (time.perf_counter() - start))
        memory = None


def madvise(address: int, num_bytes: int, advice: int) -> bool:
    """Advise the system about memory; return whether it took that. Only Linux does."""
    call = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform.startswith("linux") else None
    if call is None:
        return False
    given = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice)
    return bool(call(*given) == 0)
