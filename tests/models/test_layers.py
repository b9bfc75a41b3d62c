"""Packed linear layers: the plain product's numbers; a row's bits do not depend on other rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from specserve.models.cpu.linear_kernels import missing_for_compiled
from specserve.models.cpu.row_invariance import cancelling_products
from specserve.models.layers import (
    PackedGate,
    PackedLinear,
    PlainGate,
    PlainLinear,
    PrivateWeights,
    linear_weights,
    make_linear,
    pack_linears,
    take_gate,
)
from specserve.models.norm import RMSNorm

ROWS = 64
INNER = (64, 96, 128, 256, 320, 512, 640, 1024, 1536, 2048, 4096, 8192)
OUTER = (32, 289, 512)
KERNELS = ["onednn"] + ["compiled"] * (missing_for_compiled() is None)


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Build layers for each kernel that runs here."""
    with linear_weights(PrivateWeights(request.param)):
        yield request.param


def random_bias(outer: int) -> Tensor:
    # About as small as what is left of the sums.
    return torch.randn(outer, generator=torch.Generator().manual_seed(1)).bfloat16() * 1e-5


def num_differing(a: Tensor, b: Tensor) -> int:
    return int((a != b).sum())


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        *zip(INNER, itertools.cycle(OUTER), strict=False),
        (INNER[0], OUTER[-1]),
        (INNER[-1], OUTER[0]),
    ],
)
def test_a_row_s_bits_do_not_depend_on_the_rows_beside_it(inner: int, outer: int) -> None:
    x, weight = cancelling_products(ROWS, inner, outer)
    layer = make_linear(weight, random_bias(outer))
    assert isinstance(layer, PackedLinear)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(ROWS)])
    for count in range(2, ROWS + 1):
        first = (7 * count) % (ROWS - count + 1)
        assert num_differing(layer(x[first : first + count]), alone[first : first + count]) == 0, (
            f"{count} rows"
        )
    assert num_differing(layer(x.repeat(8, 1)), alone.repeat(8, 1)) == 0


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("inner", [64, 1024, 8192])
def test_these_products_would_show_another_order_of_summing(inner: int) -> None:
    x, weight = cancelling_products(ROWS, inner, 128)
    shuffled = torch.randperm(inner, generator=torch.Generator().manual_seed(2))
    assert (
        num_differing(make_linear(weight[:, shuffled])(x[:, shuffled]), make_linear(weight)(x))
        > 0.8 * ROWS * 128
    )


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("inner", [64, 1024, 4096])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numbers_are_those_of_the_plain_product(
    inner: int, biased: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, inner, generator=generator).to(dtype) for rows in (6, 48))
    bias = torch.randn(48, generator=generator).to(dtype) if biased else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for shape in [(6, inner), (2, 3, inner), (1, 1, 6, inner)]:
        out = make_linear(weight, bias)(x.view(shape))
        assert out.shape == (*shape[:-1], 48)
        assert out.dtype == dtype
        error = (out.view(6, 48).double() - expected).abs().max() / expected.abs().max()
        # Roundings of a sum of that many numbers, in the order of whichever processor this is.
        assert error < (2**-24 * max(16, inner**0.5) if dtype == torch.float32 else 4e-3)


def test_fp16_stays_plain() -> None:
    assert isinstance(make_linear(torch.randn(8, 8).half()), PlainLinear)


class Nested(nn.Module):
    """A linear layer, one of GPT-2's kind one level down, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 64)
        self.first = nn.Linear(64, 48, bias=False)
        self.inner = nn.ModuleList([Conv1D(32, 48)])  # type: ignore[no-untyped-call]

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.inner[0](self.first(self.embedding(ids)))
        return out


@pytest.mark.usefixtures("kernel")
def test_packing_a_model_replaces_all_its_linear_layers_and_keeps_what_it_computes() -> None:
    torch.manual_seed(0)
    model, ids = Nested().bfloat16().requires_grad_(False), torch.arange(16)
    before = model(ids)
    pack_linears(model)
    assert isinstance(model.first, PackedLinear)
    assert isinstance(model.inner[0], PackedLinear)
    assert isinstance(model.embedding, nn.Embedding)
    torch.testing.assert_close(model(ids), before, atol=1e-3, rtol=2e-2)


class Mlp(nn.Module):
    """The two first linear layers of a gated MLP."""

    def __init__(self, inner: int, outer: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(inner, outer, bias=bias) for _ in range(2))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("inner", "outer"), [(64, 48), (256, 640), (1024, 90)])
def test_a_gate_computes_what_single_operations_do(inner: int, outer: int) -> None:
    torch.manual_seed(0)
    mlp, x = Mlp(inner, outer).bfloat16().requires_grad_(False), torch.randn(ROWS, inner).bfloat16()
    gate, up = F.linear(x, mlp.gate_proj.weight), F.linear(x, mlp.up_proj.weight)
    expected = F.silu(gate) * up
    layer = take_gate(mlp, "gate_proj", "up_proj")
    assert isinstance(layer, PackedGate)
    assert mlp.gate_proj is None
    torch.testing.assert_close(layer(x), expected, atol=4e-3, rtol=2e-2)
    assert (layer(x) == expected).float().mean() > 0.97
    for rows in (1, 2, 13, 30):
        assert num_differing(layer(x[:rows]), layer(x)[:rows]) == 0


@pytest.mark.usefixtures("kernel")
def test_a_gate_is_right_where_its_exponential_ends() -> None:
    mlp = Mlp(2, 1).bfloat16().requires_grad_(False)
    mlp.gate_proj.weight.copy_(torch.tensor([[1.0, 0.0]]))
    mlp.up_proj.weight.copy_(torch.tensor([[0.0, 1.0]]))
    values = [-3e38, -1e5, -100, -88, -87, -20, -0.0, 1e-3, 20, 88, 100, 1e5, 3e38]
    x = torch.tensor([[value, 1.0] for value in values]).bfloat16()
    expected = F.silu(x[:, :1])
    layer = take_gate(mlp, "gate_proj", "up_proj")
    torch.testing.assert_close(layer(x), expected, atol=1e-35, rtol=1e-2)


def test_a_gate_with_a_bias_stays_as_it_is() -> None:
    mlp = Mlp(64, 32, bias=True).bfloat16().requires_grad_(False)
    x = torch.randn(3, 64).bfloat16()
    expected = F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    layer = take_gate(mlp, "gate_proj", "up_proj")
    assert isinstance(layer, PlainGate)
    torch.testing.assert_close(layer(x), expected, atol=4e-3, rtol=2e-2)


def test_packing_leaves_a_model_in_fp16_alone() -> None:
    model = Nested().half().requires_grad_(False)
    pack_linears(model)
    assert isinstance(model.first, nn.Linear)
    assert isinstance(model.inner[0], Conv1D)


def test_a_norm_in_float32_is_not_that_of_bf16() -> None:
    x, weight = torch.randn(3, 64), torch.randn(64)
    torch.testing.assert_close(RMSNorm(weight, 1e-6)(x), F.rms_norm(x, (64,), weight, 1e-6))


@pytest.mark.parametrize("inner", [64, 1024, 2048, 8192])
def test_a_row_with_its_residual_has_the_same_bits_alone_and_beside_others(inner: int) -> None:
    x, weight = cancelling_products(ROWS, inner, 128)
    residual = (
        torch.randn(ROWS, 128, generator=torch.Generator().manual_seed(3)).mul_(1e-6).bfloat16()
    )
    layer = make_linear(weight)
    together = layer.add_to_residual(x, residual)
    alone = torch.cat(
        [layer.add_to_residual(x[i : i + 1], residual[i : i + 1]) for i in range(ROWS)]
    )
    assert num_differing(alone, together) == 0
    assert num_differing(together, layer(x)) > 0  # the residual shows
