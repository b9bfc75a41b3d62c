"""Stores through which the ranks of a target find one another, and the group that they join."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

RENDEZVOUS_TIMEOUT = timedelta(minutes=30)
"""Time for which ranks wait for one another, while others load their weights."""


def open_store(host: str, size: int) -> TCPStore:
    """Start the store for this many ranks, on the node of rank 0, at a port that is free."""
    return TCPStore(
        host, 0, size, is_master=True, wait_for_workers=False, timeout=RENDEZVOUS_TIMEOUT
    )


def find_store(host: str, port: int, size: int) -> TCPStore:
    """Connect to the store that rank 0 has started."""
    return TCPStore(host, port, size, is_master=False, timeout=RENDEZVOUS_TIMEOUT)


def join_ranks(store: TCPStore, rank: int, size: int, *, device: torch.device) -> None:
    """Join the process group of all ranks.

    With a device, NCCL connects the ranks here, not in the first sum.
    """
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=RENDEZVOUS_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
