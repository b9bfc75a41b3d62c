"""From memory to pages: what is free, and how many pages of a cache it holds."""

from __future__ import annotations

import os

import torch

from specserve.errors import TooLittleMemory


def free_memory(device: torch.device) -> int:
    """Bytes that are free now, once the weights are there."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
    page_bytes = num_layers * kv_heads * (head_dim + (v_head_dim or head_dim)) * page_size * dtype.itemsize
    if memory_bytes < page_bytes:
        raise TooLittleMemory(f"A cache of {memory_bytes} bytes does not hold a single page of {page_size} positions ({page_bytes} bytes).")
    return memory_bytes // page_bytes
