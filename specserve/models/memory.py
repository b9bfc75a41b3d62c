"""Memory of this process and its devices: free memory, cache pages that fit, malloc, huge pages."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

from specserve.claimed_memory import HUGE_PAGE, MADV_HUGEPAGE, madvise
from specserve.errors import TooLittleMemory
from specserve.host import available_memory

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)
KEEP_BYTES, TOP_PAD_BYTES = 2**31 - 1, 2**26
MADV_COLLAPSE = 25  # of madvise(2)


def keep_freed_memory() -> None:
    """Ask glibc not to give freed memory back to the system.

    Every pass allocates the same tens of megabytes, and the page faults of fresh memory took a
    third of the time of a long prompt (512 rows, 200M parameters: 564 ms before, 321 ms after).
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        for option, value in (
            (M_MMAP_THRESHOLD, KEEP_BYTES),
            (M_TRIM_THRESHOLD, KEEP_BYTES),
            (M_TOP_PAD, TOP_PAD_BYTES),
        ):
            mallopt(option, value)


def release_freed_memory() -> None:
    """Give freed memory back to the system once, after work that will not come again."""
    malloc_trim = (
        getattr(ctypes.CDLL(None), "malloc_trim", None)
        if sys.platform.startswith("linux")
        else None
    )
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Ask Linux to put this memory into huge pages, as far as it consists of whole ones.

    A pass reads all weights once; in pages of 4 kB it looks up, and evicts again, most of the
    address tables on the way. Kernels before 6.1 move the memory gradually, if at all.
    A pass of one row, 200M parameters, one thread: 17.2 ms before, 15.2 ms after.
    """
    first, last = (
        -(-address // HUGE_PAGE) * HUGE_PAGE,
        (address + num_bytes) // HUGE_PAGE * HUGE_PAGE,
    )
    if first >= last:
        return
    # This is advice only: nothing is lost where it is not taken.
    for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
        madvise(first, last - first, advice)


def free_memory(device: torch.device) -> int:
    """Return the bytes of a device that can be taken now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


def require_room(directory: Path, num_bytes: int, *, device: torch.device, ranks: int) -> None:
    """Raise TooLittleMemory for a model whose weights, `num_bytes` on all ranks, cannot fit.

    A system that runs out of memory during loading reports nothing: it kills the process.
    """
    needed = num_bytes // ranks
    free = free_memory(device)
    if needed > free:
        share = f", a rank's share of {ranks}," if ranks > 1 else ""
        raise TooLittleMemory(
            f"the weights of {directory}{share} take {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB of {device.type} memory are free; "
            "use a smaller model or number format, or more GPUs "
            "(target.tensor_parallel; `specserve plan --gpus` says how many)"
        )


def page_bytes(
    *,
    num_layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int = 16,
    v_head_dim: int | None = None,
) -> int:
    """Return the bytes of a page of the KV cache, in all layers."""
    return (
        num_layers * kv_heads * (head_dim + (v_head_dim or head_dim)) * page_size * dtype.itemsize
    )


def num_pages_for(memory_bytes: int, page: int, *, page_size: int) -> int:
    """Return how many pages of `page` bytes fit into a memory budget.

    Raises TooLittleMemory when not one does.
    """
    if memory_bytes < page:
        raise TooLittleMemory(
            f"a cache of {memory_bytes / 2**20:.1f} MiB does not hold a single page of "
            f"{page_size} positions ({page / 2**20:.1f} MiB); "
            "free memory, raise cache.memory_fraction or target.tensor_parallel, "
            "or use a smaller model"
        )
    return memory_bytes // page


def require_memory_for_pages(pages: int, page: int) -> None:
    """Raise TooLittleMemory if the host lacks the memory of that many pages of `page` bytes."""
    free = available_memory()
    if pages * page > free:
        raise TooLittleMemory(
            f"cache.pages {pages:,} take {pages * page / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB of memory are free; lower it, or leave it out for as many "
            "as fit"
        )
