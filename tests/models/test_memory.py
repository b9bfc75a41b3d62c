"""Huge pages: only whole ones inside the given memory are advised, and its contents stay."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import pytest
import torch

from specserve.claimed_memory import HUGE_PAGE
from specserve.models.memory import use_huge_pages


def advised_ranges(
    monkeypatch: pytest.MonkeyPatch, address: int, num_bytes: int
) -> set[tuple[int, int]]:
    """Return start and length of the memory that the kernel would be called with."""
    ranges: set[tuple[int, int]] = set()

    def madvise(start: ctypes.c_void_p, length: ctypes.c_size_t, advice: ctypes.c_int) -> int:
        ranges.add((start.value or 0, length.value))
        return -1  # an error must do no harm

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(madvise=madvise))
    use_huge_pages(address, num_bytes)
    return ranges


def test_only_whole_huge_pages_inside_the_memory_are_advised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert advised_ranges(monkeypatch, HUGE_PAGE + 64, 3 * HUGE_PAGE) == {
        (2 * HUGE_PAGE, 2 * HUGE_PAGE)
    }
    assert advised_ranges(monkeypatch, 5 * HUGE_PAGE, HUGE_PAGE) == {(5 * HUGE_PAGE, HUGE_PAGE)}
    assert advised_ranges(monkeypatch, 5 * HUGE_PAGE + 1, 2 * HUGE_PAGE - 2) == set()


def test_memory_in_huge_pages_keeps_its_contents() -> None:
    memory = torch.arange(2**21)
    use_huge_pages(memory.data_ptr(), memory.nbytes)
    assert torch.equal(memory, torch.arange(2**21))


def test_huge_pages_are_skipped_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    use_huge_pages(HUGE_PAGE, HUGE_PAGE)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    use_huge_pages(HUGE_PAGE, HUGE_PAGE)
