"""Memory of this process and its devices: what is free, how many pages of a cache it holds, and keeping what was freed at hand."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch

from specserve.errors import TooLittleMemory
from specserve.models.checkpoints.weights import num_stored

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)
KEPT, STEP = 2**31 - 1, 2**26


def keep_freed_memory() -> None:
    """Ask glibc not to give freed memory back. Every pass allocates the same tens of megabytes, and faulting them in anew took a third
    of the time of a long prompt (512 rows, 200M parameters: 564 ms before, 321 ms after).
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries do without
    if mallopt is not None:
        for option, value in (
            (M_MMAP_THRESHOLD, KEPT),
            (M_TRIM_THRESHOLD, KEPT),
            (M_TOP_PAD, STEP),
        ):
            mallopt(option, value)


def free_memory(device: torch.device) -> int:
    """Bytes that are free now, once the weights are there."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_room(directory: Path, *, dtype: torch.dtype, device: torch.device, ranks: int) -> None:
    """Raises TooLittleMemory for a model that cannot fit: a system that runs out of memory while it reads says nothing, it kills."""
    needed = num_stored(directory) * dtype.itemsize // ranks
    free = free_memory(device)
    if needed > free:
        share = f", a rank's share of {ranks}," if ranks > 1 else ""
        raise TooLittleMemory(
            f"the weights of {directory}{share} take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of {device.type} memory are free; "
            "use a smaller model or number format, or more GPUs (target.tensor_parallel; `specserve plan --gpus` says how many)"
        )


def pages_for(
    memory_bytes: int,
    *,
    num_layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int = 16,
    v_head_dim: int | None = None,
) -> int:
    """How many pages of a cache with these options fit into a memory budget. Raises TooLittleMemory when not one does."""
    page_bytes = (
        num_layers * kv_heads * (head_dim + (v_head_dim or head_dim)) * page_size * dtype.itemsize
    )
    if memory_bytes < page_bytes:
        raise TooLittleMemory(
            f"a cache of {memory_bytes / 2**20:.1f} MiB does not hold a single page of {page_size} positions ({page_bytes / 2**20:.1f} MiB); "
            "free memory, raise cache.memory_fraction or target.tensor_parallel, or use a smaller model"
        )
    return memory_bytes // page_bytes
