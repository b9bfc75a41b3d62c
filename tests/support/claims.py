"""Memory that a cache still claims, for tests that measure a process's."""

from __future__ import annotations

from time import sleep

from specserve.claimed_memory import ClaimedMemory


def wait_until_claimed() -> None:
    """Have everything claimed that this process has reserved, opened as models or not."""
    ClaimedMemory.claim_all()
    while ClaimedMemory.num_unclaimed():
        sleep(0.001)
