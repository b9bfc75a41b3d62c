"""The check of linear kernels at a model's shapes: a kernel that fails is replaced, and logged."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.models.cpu import row_invariance
from specserve.models.cpu.linear_kernels import (
    LinearKernel,
    OneDnnKernel,
    linear_kernel,
    missing_for_compiled,
)
from specserve.models.cpu.row_invariance import (
    RowByRowKernel,
    cancelling_products,
    float32_row_step,
    is_batch_invariant,
    is_row_invariant,
    row_invariant_kernel,
)
from specserve.models.layers import PackedGate, PackedLinear, PrivateWeights, linear_weights

KERNELS = ["onednn"] + ["compiled"] * (missing_for_compiled() is None)


class SplittingKernel:
    """A kernel that sums from `rows` rows on in two halves, as AMX products sum in another order.

    Single rows are products of float64, so that nothing else shows.
    """

    name = "splitting"

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def pack(self, weight: Tensor) -> Tensor:
        return weight.detach().clone()

    def product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        out = self.unrounded_product(x, packed, outputs, bias)
        return (out if residual is None else out + residual).bfloat16()

    def unrounded_product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None
    ) -> Tensor:
        parts = 2 if len(x) >= self.rows else 1
        out = torch.zeros(len(x), outputs)
        for inputs, weights in zip(x.chunk(parts, 1), packed.chunk(parts, 1), strict=True):
            out = (out + inputs.double() @ weights.double().T).float()
        return out if bias is None else out + bias

    def interleave(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.cat([gate, up])

    def gated_product(self, x: Tensor, packed: Tensor, outputs: int) -> Tensor:
        gate, up = self.product(x, packed, 2 * outputs, None, None).chunk(2, dim=-1)
        return F.silu(gate) * up


class DriftingKernel(SplittingKernel):
    """A kernel that adds something else at each call."""

    name = "drifting"

    def product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        self.rows += 1
        return super().product(x, packed, outputs, bias, residual) + self.rows


class SplittingWeights(PrivateWeights):
    """Weights for which a kernel is chosen that depends on the rows of a pass."""

    @property
    def kernel(self) -> LinearKernel:
        return SPLITTING


SPLITTING = SplittingKernel(2)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", [(16, 40), (97, 33), (256, 512), (2048, 70), (8192, 4096)])
def test_kernels_in_use_pass(name: str, shape: tuple[int, int]) -> None:
    kernel = linear_kernel(name)
    assert row_invariant_kernel(kernel, *shape) is kernel
    assert is_row_invariant(RowByRowKernel(kernel), *shape)


@pytest.mark.parametrize("shape", [(16, 40), (97, 33), (256, 512), (2048, 70), (8192, 4096)])
def test_float32_has_row_invariant_products_whatever_kernel_is_set(shape: tuple[int, int]) -> None:
    with linear_weights(SplittingWeights()):
        layer = PackedLinear(torch.randn(shape[1], shape[0]))
    assert layer.kernel is linear_kernel("onednn", torch.float32)
    assert is_row_invariant(layer.kernel, *shape, torch.float32)
    assert not is_row_invariant(SPLITTING, 64, 16, torch.float32)


def test_rows_of_batched_products_are_padded_to_the_first_step_that_keeps_their_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_invariance, "is_batch_invariant", lambda step, *_: step >= 8)
    assert float32_row_step(33, 78) == 8


def test_a_batched_product_that_depends_on_its_rows_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bmm(x: Tensor, factor: Tensor) -> Tensor:
        out = x @ factor
        return out if x.shape[1] > 8 else out + 1e-6

    monkeypatch.setattr(torch, "bmm", bmm)
    assert not is_batch_invariant(4, 32, 256)


def test_where_no_step_helps_rows_are_not_padded_and_the_log_says_what_may_happen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(row_invariance, "is_batch_invariant", lambda *_: False)
    with caplog.at_level(logging.WARNING):
        assert float32_row_step(33, 77) == 1
    assert "from 33 to 77: the bits of a row depend" in caplog.text


@pytest.mark.parametrize("rows", [2, 16, 48])
@pytest.mark.parametrize("shape", [(64, 16), (512, 2048), (28672, 8192)])
def test_a_kernel_that_depends_on_the_number_of_rows_is_replaced(
    caplog: pytest.LogCaptureFixture, rows: int, shape: tuple[int, int]
) -> None:
    with caplog.at_level(logging.WARNING):
        kernel = row_invariant_kernel(SplittingKernel(rows), *shape)
    assert kernel is linear_kernel("onednn")
    assert f"from {shape[0]} to {shape[1]} run in {kernel.name}: in splitting the" in caplog.text


def test_numbers_that_do_not_cancel_would_not_show_it() -> None:
    x, weight = torch.randn(48, 512).bfloat16(), torch.randn(64, 512).bfloat16()
    together = SplittingKernel(2).product(x, weight, 64, None, None)
    assert (together == SplittingKernel(99).product(x, weight, 64, None, None)).float().mean() > 0.9


def test_layers_are_built_with_the_kernel_that_takes_its_place() -> None:
    x, weight = cancelling_products(20, 512, 64)
    with linear_weights(SplittingWeights()):
        linear, gate = PackedLinear(weight), PackedGate(weight, weight.flip(0))
    for layer in (linear, gate):
        assert isinstance(layer.kernel, OneDnnKernel)
        assert torch.equal(layer(x), torch.cat([layer(x[row : row + 1]) for row in range(20)]))


def test_where_onednn_fails_as_well_rows_are_multiplied_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, onednn = SplittingKernel(3), SplittingKernel(2)
    monkeypatch.setattr(row_invariance, "linear_kernel", lambda *_: onednn)
    with caplog.at_level(logging.WARNING):
        kernel = row_invariant_kernel(first, 512, 64)
    assert "run in splitting, row by row: in splitting the bits" in caplog.text
    x, weight = cancelling_products(20, 512, 64)
    out = kernel.product(x, kernel.pack(weight), 64, None, None)
    assert torch.equal(out, SplittingKernel(99).product(x, weight, 64, None, None))


def test_where_all_kernels_fail_the_log_says_what_may_happen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drifting = DriftingKernel(2)
    monkeypatch.setattr(row_invariance, "linear_kernel", lambda *_: drifting)
    with caplog.at_level(logging.WARNING):
        assert row_invariant_kernel(drifting, 512, 64) is drifting
    assert "texts may depend on what else is served" in caplog.text
