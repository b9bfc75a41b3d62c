"""The self-test of a device: sound ones pass, and a wrong bit anywhere is found and described."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specserve.models import self_test
from specserve.models.self_test import find_fault
from tests.support.card import emulated_cards

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
Product = Callable[[Tensor, Tensor], Tensor]


@pytest.mark.parametrize(
    "device", [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]
)
def test_a_sound_device_passes(device: torch.device) -> None:
    assert find_fault(device) is None


def test_a_sound_card_passes_and_keeps_none_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "BLOCK_BYTES", 2**20)  # a host's memory is slow
    with emulated_cards():
        assert find_fault(CARD) is None
        assert torch.cuda.max_memory_allocated(CARD) > torch.cuda.memory_allocated(CARD) == 0


def corrupt(dtype: torch.dtype, *, run: int | None = None) -> Product:
    """Return a product with one wrong element: in one run, or in every one."""
    multiply, counts = torch.mm, [0]

    def mm(left: Tensor, right: Tensor) -> Tensor:
        product = multiply(left, right)
        if left.dtype is dtype:
            counts[0] += 1
            if run in (None, counts[0]):
                product[3, 5] += 1
        return product

    return mm


@pytest.mark.parametrize("device", [CPU, CARD], ids=str)
@pytest.mark.parametrize("dtype", self_test.FORMATS, ids=str)
def test_a_product_with_one_wrong_element_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch, "mm", corrupt(dtype))
    with emulated_cards():
        fault = find_fault(device)
    assert fault is not None
    assert f"1 of {65_536 if device is CPU else 4_194_304} elements" in fault
    assert f"a product in {str(dtype).removeprefix('torch.')} are wrong" in fault
    assert "the same in each of 2 runs; row 3, column 5 is" in fault


@pytest.mark.parametrize("run", [1, 2])
def test_a_product_that_is_wrong_once_is_a_fault_that_comes_and_goes(
    monkeypatch: pytest.MonkeyPatch, run: int
) -> None:
    monkeypatch.setattr(torch, "mm", corrupt(torch.float32, run=run))
    fault = find_fault(CPU)
    assert fault is not None
    assert "others in each of 2 runs; row 3, column 5 is" in fault


def test_memory_that_keeps_another_number_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    write, patterns = self_test._pattern, list[Tensor]()

    def pattern(length: int, number: int, device: torch.device) -> Tensor:
        patterns.append(write(length, number, device))
        if len(patterns) == 1:
            patterns[0][7] ^= 1 << 40
        return patterns[-1]

    monkeypatch.setattr(self_test, "_pattern", pattern)
    assert find_fault(CPU) == "1 of 131072 numbers in memory were read otherwise than written"


def test_places_of_the_memory_hold_different_numbers_so_that_a_mirrored_address_shows() -> None:
    blocks = torch.cat([self_test._pattern(2**17, number, CPU) for number in range(4)])
    assert len(set(blocks.tolist())) == blocks.numel()


def test_an_error_of_the_device_is_a_fault_and_full_memory_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = [
        RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with ..."),
        torch.OutOfMemoryError("CUDA out of memory"),
    ]

    def mm(left: Tensor, right: Tensor) -> Tensor:
        raise errors.pop(0)

    monkeypatch.setattr(torch, "mm", mm)
    assert find_fault(CPU) == (
        "its self-test ended with: CUDA error: uncorrectable ECC error encountered"
    )
    assert find_fault(CPU) is None
