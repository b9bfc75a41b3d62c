"""Kernels of linear layers: which one is taken, and products that do not fit its blocks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.cpu import linear_kernels
from specserve.models.cpu.compiled_attention import CompiledAttention
from specserve.models.cpu.linear_kernels import (
    CompiledKernel,
    LinearKernel,
    OneDnnKernel,
    WidenedOneDnnKernel,
    linear_kernel,
    missing_for_compiled,
    multiplies_bf16,
)
from specserve.models.layout import Layout

needs_compiled = pytest.mark.skipif(
    missing_for_compiled() is not None, reason=f"it needs {missing_for_compiled()}"
)
SHAPES = [(1, 32, 2), (14, 33, 64), (15, 31, 65), (505, 48, 34), (29, 96, 4098), (3, 4096, 256)]


@pytest.fixture(autouse=True)
def clear_cache() -> Iterator[None]:
    linear_kernels.missing_for_compiled.cache_clear()
    yield
    linear_kernels.missing_for_compiled.cache_clear()


def random_tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


KERNELS = [
    pytest.param(lambda: linear_kernel("compiled"), marks=needs_compiled, id="compiled"),
    pytest.param(WidenedOneDnnKernel, id="onednn-float32"),
    pytest.param(
        OneDnnKernel,
        marks=pytest.mark.skipif(not multiplies_bf16(), reason="oneDNN has no bf16 here"),
        id="onednn",
    ),
]


@pytest.mark.parametrize("make", KERNELS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_products_of_any_shape_are_right(
    rows: int, outputs: int, inputs: int, threads: int, make: Callable[[], LinearKernel]
) -> None:
    kernel = make()
    x, weight, bias, residual = random_tensors(
        (rows, inputs), (outputs, inputs), (outputs,), (rows, outputs)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        packed = kernel.pack(weight)
        plain = kernel.product(x, packed, outputs, None, None)
        full = kernel.product(x, packed, outputs, bias, residual)
        unrounded = kernel.unrounded_product(x, packed, outputs, bias)
    finally:
        torch.set_num_threads(before)
    expected = x.double() @ weight.double().T
    for out, of in ((plain, expected), (full, expected + bias.double() + residual.double())):
        assert out.shape == (rows, outputs)
        assert (out.double() - of).abs().max() < 4e-3 * of.abs().max()
    exact = expected + bias.double()
    assert unrounded.dtype == torch.float32
    assert (unrounded.double() - exact).abs().max() < 2e-5 * exact.abs().max()


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(33, 96, 1000), (33, 257, 2048)])
def test_a_row_of_widened_weights_has_the_same_bits_in_any_company(
    rows: int, outputs: int, inputs: int
) -> None:
    kernel = WidenedOneDnnKernel()
    x, weight, residual = random_tensors((rows, inputs), (outputs, inputs), (rows, outputs))
    packed = kernel.pack(weight)
    whole = kernel.product(x, packed, outputs, None, residual)
    for first, length in [(0, 1), (7, 1), (0, 2), (3, 5), (11, 9), (16, 17)]:
        part = slice(first, first + length)
        out = kernel.product(x[part], packed, outputs, None, residual[part])
        assert torch.equal(out, whole[part])


@needs_compiled
def test_a_team_and_a_single_thread_compute_the_same_bits() -> None:
    kernel = linear_kernel("compiled")
    x, weight = random_tensors((21, 512), (640, 512))
    packed, found = kernel.pack(weight), []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(kernel.product(x, packed, 640, None, None))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@needs_compiled
def test_products_of_several_callers_at_once_are_right() -> None:
    kernel = linear_kernel("compiled")
    x, weight = random_tensors((9, 256), (2048, 256))
    packed = kernel.pack(weight)
    expected = kernel.product(x, packed, 2048, None, None)
    wrong: list[int] = []

    def multiply() -> None:
        for i in range(50):
            if not torch.equal(kernel.product(x, packed, 2048, None, None), expected):
                wrong.append(i)

    threads = [Thread(target=multiply) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_compiled
def test_infinite_and_undefined_numbers_stay_what_they_are() -> None:
    kernel = linear_kernel("compiled")
    x = torch.tensor([[1.0, 0.0], [math.inf, 0.0], [float("nan"), 0.0], [3e38, 3e38]]).bfloat16()
    out = kernel.product(x, kernel.pack(torch.ones(1, 2).bfloat16()), 1, None, None)[:, 0]
    assert out[0] == 1
    assert out[1] == math.inf
    assert out[2].isnan()
    assert out[3] == math.inf


@pytest.mark.parametrize(
    ("flags", "found", "missing"),
    [
        ({"avx2"}, True, "a processor that has AVX-512 with bf16"),
        ({"avx512_bf16"}, False, r"llvmlite \(pip install 'specserve\[cpu\]'\)"),
    ],
)
def test_a_kernel_that_cannot_run_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], found: bool, missing: str
) -> None:
    monkeypatch.setattr(linear_kernels, "processor_flags", lambda: frozenset(flags))
    monkeypatch.setattr(linear_kernels, "find_spec", lambda name: found or None)
    monkeypatch.setattr(linear_kernels, "multiplies_bf16", lambda: True)
    assert isinstance(linear_kernel("auto"), OneDnnKernel)
    assert isinstance(linear_kernel("onednn"), OneDnnKernel)
    with pytest.raises(ConfigError, match=f"weights.kernel: compiled needs {missing}"):
        linear_kernel("compiled")


@pytest.mark.parametrize("flags", [{"avx512_bf16"}, {"avx512_bf16", "amx_bf16", "amx_tile"}])
def test_a_processor_with_amx_runs_the_compiled_kernel_too(
    monkeypatch: pytest.MonkeyPatch, flags: set[str]
) -> None:
    monkeypatch.setattr(linear_kernels, "processor_flags", lambda: frozenset(flags))
    monkeypatch.setattr(linear_kernels, "find_spec", lambda name: True)
    monkeypatch.setattr(linear_kernels, "multiplies_bf16", lambda: True)
    assert missing_for_compiled() is None


def test_a_processor_without_bf16_keeps_bf16_weights_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_kernels, "processor_flags", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(linear_kernels, "multiplies_bf16", lambda: False)
    linear_kernels._onednn.cache_clear()
    try:
        assert isinstance(linear_kernel("auto"), WidenedOneDnnKernel)
        with pytest.raises(ConfigError, match="a processor that has AVX-512 with bf16"):
            linear_kernel("compiled")
    finally:
        linear_kernels._onednn.cache_clear()


@needs_compiled
@pytest.mark.parametrize("wrong", ["numbers", "rows"])
def test_a_kernel_that_computes_something_else_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    right = CompiledKernel.product

    def product(
        self: CompiledKernel,
        x: Tensor,
        packed: Tensor,
        outputs: int,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        out = right(self, x, packed, outputs, bias, residual)
        return out * 1.5 if wrong == "numbers" else out * (1 + 2**-8 * (len(x) > 1))

    monkeypatch.setattr(CompiledKernel, "product", product)
    assert "linear layers run in oneDNN, the compiled kernel fails: its" in refusal(caplog)


@needs_compiled
@pytest.mark.parametrize("wrong", ["is wrong", "depends on what shares a pass"])
def test_attention_that_computes_something_else_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    right = CompiledAttention.attend

    def attend(self: CompiledAttention, layout: Layout, *given: Any) -> Tensor:
        out = right(self, layout, *given)
        return out * 1.5 if wrong == "is wrong" else out * (1 + 2**-7 * (len(out) == 1))

    monkeypatch.setattr(CompiledAttention, "attend", attend)
    assert f"the compiled kernel fails: its attention {wrong}" in refusal(caplog)


def refusal(caplog: pytest.LogCaptureFixture) -> str:
    """Ask for a kernel again, which must be oneDNN's, and return what the log says."""
    linear_kernels._compiled.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert isinstance(linear_kernel("auto"), OneDnnKernel)
    finally:
        linear_kernels._compiled.cache_clear()
    return caplog.text
