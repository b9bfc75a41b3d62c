"""Huge pages: only whole ones of the memory that was named are advised, and its contents stay what they are."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import pytest
import torch

from specserve.models import huge
from specserve.models.huge import HUGE_PAGE, use_huge_pages


def advised(monkeypatch: pytest.MonkeyPatch, address: int, num_bytes: int) -> set[tuple[int, int]]:
    """Start and length of what the kernel would be asked for."""
    asked: set[tuple[int, int]] = set()

    def madvise(start: ctypes.c_void_p, length: ctypes.c_size_t, advice: ctypes.c_int) -> int:
        asked.add((start.value or 0, length.value))
        return -1  # a refusal must do no harm

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(huge.ctypes, "CDLL", lambda _: SimpleNamespace(madvise=madvise))
    use_huge_pages(address, num_bytes)
    return asked


def test_only_whole_pages_inside_the_memory_are_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advised(monkeypatch, HUGE_PAGE + 64, 3 * HUGE_PAGE) == {(2 * HUGE_PAGE, 2 * HUGE_PAGE)}
    assert advised(monkeypatch, 5 * HUGE_PAGE, HUGE_PAGE) == {(5 * HUGE_PAGE, HUGE_PAGE)}
    assert advised(monkeypatch, 5 * HUGE_PAGE + 1, 2 * HUGE_PAGE - 2) == set()


def test_the_contents_stay() -> None:
    memory = torch.arange(2**21)
    use_huge_pages(memory.data_ptr(), memory.nbytes)
    assert torch.equal(memory, torch.arange(2**21))


def test_where_there_is_no_such_advice_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    use_huge_pages(HUGE_PAGE, HUGE_PAGE)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(huge.ctypes, "CDLL", lambda _: SimpleNamespace())
    use_huge_pages(HUGE_PAGE, HUGE_PAGE)
