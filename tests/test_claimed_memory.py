"""Zeros that are there at once, and claimed by a thread: kept contents, counting, and the end."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from threading import Event, current_thread
from time import sleep
from weakref import WeakSet

import pytest
import torch

from specserve import LLM, claimed_memory, host
from specserve.claimed_memory import HUGE_PAGE, ClaimedMemory
from specserve.config.tree import DEMO
from specserve.models import cache
from specserve.models.cache import PagedCache
from tests.support.claims import wait_until_claimed

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="Linux alone gives memory when asked to"
)

NUM_BYTES = 5 * HUGE_PAGE + 4096


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> tuple[Event, list[int]]:
    """Return an event for which the thread that claims waits, and the bytes of each step."""
    monkeypatch.setattr(ClaimedMemory, "_living", WeakSet())
    proceed, steps = Event(), list[int]()

    def madvise(address: int, num_bytes: int, advice: int) -> bool:
        if advice == claimed_memory.MADV_POPULATE_WRITE:
            steps.append(num_bytes)
            if current_thread().name == "claim":
                assert proceed.wait(timeout=60)
        return True

    monkeypatch.setattr(claimed_memory, "madvise", madvise)
    return proceed, steps


def reserved(num_bytes: int) -> ClaimedMemory:
    memory = ClaimedMemory.reserve(num_bytes)
    assert memory is not None
    return memory


def test_what_is_written_meanwhile_stays_and_the_rest_is_zero() -> None:
    memory = reserved(NUM_BYTES)
    numbers = torch.frombuffer(memory, dtype=torch.uint8)
    numbers[-1] = 7
    ClaimedMemory.claim_all()
    numbers[3 * HUGE_PAGE] = 7
    wait_until_claimed()
    assert numbers[-1] == numbers[3 * HUGE_PAGE] == 7
    assert numbers.count_nonzero() == 2


def test_memory_counts_as_taken_before_it_is_claimed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: tuple[Event, list[int]]
) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 2097152 kB\n", encoding="ascii")
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "OWN_GROUP", tmp_path / "no group")
    proceed, _ = asked
    assert host.available_memory() == 2**31
    memory = reserved(2**29)  # of which nothing is written
    assert host.available_memory() == 2**31 - 2**29 + HUGE_PAGE
    ClaimedMemory.claim_all()
    proceed.set()
    wait_until_claimed()
    assert host.available_memory() == 2**31
    assert len(memory) == 2**29


def test_all_is_claimed_in_steps_and_not_before_it_is_asked_for(
    asked: tuple[Event, list[int]],
) -> None:
    proceed, steps = asked
    memory, other = reserved(NUM_BYTES), reserved(4096)
    assert steps == [HUGE_PAGE, 4096]
    proceed.set()
    for _ in range(2):  # once is enough
        ClaimedMemory.claim_all()
    wait_until_claimed()
    assert sorted(steps) == [4096] * 2 + [HUGE_PAGE] * 5
    assert memory[:] == bytes(NUM_BYTES)
    assert other[:] == bytes(4096)


def test_a_claim_ends_with_the_last_reference(asked: tuple[Event, list[int]]) -> None:
    proceed, steps = asked
    memory = reserved(100 * HUGE_PAGE)
    ClaimedMemory.claim_all()
    gone = weakref.ref(memory)
    numbers = torch.frombuffer(memory, dtype=torch.uint8)
    del memory
    gc.collect()
    assert gone() is not None, "the tensor keeps it"
    del numbers
    proceed.set()
    while gone() is not None:
        sleep(0.001)
    assert len(steps) <= 3


@pytest.mark.parametrize("claims", [True, False], ids=["claimed", "refused"])
def test_a_large_cache_has_zeros_in_all_pages(
    monkeypatch: pytest.MonkeyPatch, *, claims: bool
) -> None:
    monkeypatch.setattr(cache, "CLAIMED_LATER", 1)
    monkeypatch.setattr(claimed_memory, "HUGE_PAGE", 4096)
    monkeypatch.setattr(ClaimedMemory, "_living", WeakSet())
    if not claims:
        monkeypatch.setattr(claimed_memory, "madvise", lambda *given: False)
    pages = PagedCache(
        num_layers=2,
        kv_heads=3,
        head_dim=8,
        num_pages=50,
        dtype=torch.bfloat16,
        device="cpu",
        state_width=5,
    )
    pages.keys[1][-1] = 1
    assert [len(pages.keys), len(pages.values), pages.keys[0].shape[1:]] == [2, 2, (3, 8)]
    assert not any(part.any() for part in (pages.keys[0], *pages.values, pages.states))
    assert pages.keys[1].float().sum() == 3 * 8
    pages.resize(20)
    assert not pages.keys[1].any()
    assert bool(ClaimedMemory.num_unclaimed()) == claims
    ClaimedMemory.claim_all()
    wait_until_claimed()
    assert not pages.keys[1].any()


def test_models_that_are_open_have_their_caches_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CLAIMED_LATER", 1)
    monkeypatch.setattr(ClaimedMemory, "_living", WeakSet())
    with LLM(DEMO / "target", DEMO / "draft", **{"cache.pages": 300}):
        assert len(ClaimedMemory._living) == 4, "keys and values of both"
        assert all(memory._has_claimant for memory in ClaimedMemory._living)
        while ClaimedMemory.num_unclaimed():
            sleep(0.001)
