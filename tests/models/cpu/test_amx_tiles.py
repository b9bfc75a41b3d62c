"""Tests of the tiles of AMX, beside the order of sums that Intel documents for it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from specserve.models.coded_weight import CodedWeight
from specserve.models.cpu.linear_kernels import CompiledKernel, linear_kernel

pytest.importorskip("llvmlite")
from llvmlite import binding

from specserve.models.cpu.compiled import amx_tiles

ROWS = (1, 2, 15, 16, 17, 32, 33, 70, 300)
OUTPUTS = 80
with_amx = pytest.mark.skipif(
    not amx_tiles.may_use_amx(), reason="needs a processor with AMX for bf16"
)


@pytest.fixture
def kernel() -> CompiledKernel:
    torch.manual_seed(0)
    found = linear_kernel("auto")
    assert isinstance(found, CompiledKernel)
    return found


def step_sums(x: Tensor, weight: Tensor) -> list[Tensor]:
    """Return what each 32 inputs add: the even ones in order, the odd ones, then both."""
    steps = []
    for first in range(0, x.shape[1], 32):
        halves = torch.zeros(2, len(x), len(weight))
        for i in range(first, first + 32):
            halves[i % 2] += x[:, i, None] * weight[:, i]
        steps.append(halves[0] + halves[1])
    return steps


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c, rounded once: the numbers of these tests are exact in float64."""
    return (a.double() * b.double() + c.double()).float()


@with_amx
@pytest.mark.parametrize("inputs", [32, 96, 2048 + 32])
def test_a_product_adds_up_in_the_documented_order(kernel: CompiledKernel, inputs: int) -> None:
    x, weight = torch.randn(max(ROWS), inputs).bfloat16(), torch.randn(OUTPUTS, inputs).bfloat16()
    expected = torch.zeros(len(x), OUTPUTS)
    for more in step_sums(x.float(), weight.float()):
        expected += more
    packed = kernel.pack(weight)
    for rows in ROWS:
        out = kernel.unrounded_product(x[:rows], packed, OUTPUTS, None)
        assert torch.equal(out, expected[:rows]), f"{rows} rows"


@with_amx
@pytest.mark.parametrize("in_fp16", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("has_minima", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_scaled_spans_add_up_in_the_documented_order(
    kernel: CompiledKernel, bits: int, *, has_minima: bool, group: int, in_fp16: bool
) -> None:
    groups = 1152 // group  # more than are widened at once
    x = torch.randint(-8, 8, (max(ROWS), 1152)).bfloat16()  # whose sums are exact
    low, high = {8: (-128, 128), 4: (0, 16) if has_minima else (-8, 8)}[bits]
    integers = torch.randint(low, high, (OUTPUTS, 1152)).to(torch.int8)
    scales = torch.rand(OUTPUTS, groups)
    scales = scales.half().float() if in_fp16 else scales
    minima = torch.randn(OUTPUTS, groups).half().float() if has_minima else None
    expected = torch.zeros(len(x), OUTPUTS)
    for i in range(groups):
        own = slice(group * i, group * (i + 1))
        sums = torch.zeros(len(x), OUTPUTS)
        for more in step_sums(x[:, own].float(), integers[:, own].float()):
            sums += more
        expected = fused(sums, scales[:, i], expected)
        if minima is not None:
            expected = fused(x[:, own].float().sum(dim=1, keepdim=True), minima[:, i], expected)
    packed = kernel.pack(CodedWeight.from_integers(integers, scales, minima))
    for rows in ROWS:
        out = kernel.unrounded_product(x[:rows], packed, OUTPUTS, None)
        assert torch.equal(out, expected[:rows]), f"{rows} rows"


@pytest.mark.parametrize("refused", [False, True])
def test_a_system_may_refuse_amx(monkeypatch: pytest.MonkeyPatch, *, refused: bool) -> None:
    class System:
        def __init__(self, name: None) -> None:
            pass

        def syscall(self, *asked: int) -> int:
            assert asked == (158, 0x1023, 18)
            return -1 if refused else 0

    def features() -> dict[str, bool]:
        return {"amx-tile": True, "amx-bf16": True}

    monkeypatch.setattr(ctypes, "CDLL", System)
    monkeypatch.setattr(binding, "get_host_cpu_features", features)
    asked: Any = amx_tiles.may_use_amx.__wrapped__
    assert asked() == (not refused)
