"""The product of rows with FP8 weights on a GPU, by torch's kernel for scales of rows.

It reads one byte for each weight, where bf16 has two. A pass of few rows takes as long as reading
its weights does.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from specserve.errors import first_line
from specserve.models.float8_weight import FLOAT8, LARGEST_FLOAT8, Float8Weight

MULTIPLE = 16
"""The kernels take matrices whose rows and columns are this number or a multiple of it."""
CAPABILITY = (8, 9)
"""Compute capability of the first cards that multiply FP8: Ada, then Hopper (9.0)."""
SMALLEST_SCALE = 2.0**-100
"""Scale of a row of zeros."""
ROWS, INPUTS, OUTPUTS = (1, 5, 40), 192, 80
"""Sizes of a trial's products."""
TOLERANCE = 2**-6
"""Error of a trial's results, as a share of the largest of its row."""


def scale_rows(x: Tensor, largest_input: float = math.inf) -> tuple[Tensor, Tensor]:
    """Return rows [n, in] in FP8, and their scales [n, 1]; a row's depend on that row alone."""
    largest = torch.linalg.vector_norm(x, ord=torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
    scales = largest.div_(LARGEST_FLOAT8)
    scales.clamp_(SMALLEST_SCALE, largest_input / LARGEST_FLOAT8)
    scaled = x / scales
    return (scaled if largest_input == math.inf else _cut_off(scaled)).to(FLOAT8), scales


def round_inputs(x: Tensor, weight: Float8Weight) -> tuple[Tensor, Tensor]:
    """Return a product's inputs [n, in] in FP8 as its weight says, and their scales [n, 1]."""
    if weight.input_scale is None:
        return scale_rows(x, weight.largest_input)
    scales = weight.input_scale.expand(len(x), 1).contiguous()  # the kernel takes one a row
    return _cut_off(x / weight.input_scale).to(FLOAT8), scales


def _cut_off(scaled: Tensor) -> Tensor:
    """Cut off in place what FP8 cannot hold; not all versions of torch do so as they round."""
    return scaled.clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8)


def float8_product(x: Tensor, weight: Float8Weight, bias: Tensor | None) -> Tensor:
    """Return x W^T + b in bf16, of rows [n, in]."""
    rows, row_scales = round_inputs(x, weight)
    return torch._scaled_mm(
        rows,
        weight.codes.t(),
        scale_a=row_scales,
        scale_b=weight.scales.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
    )


@cache
def float8_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a GPU cannot multiply FP8 weights; None if it has done so in a trial."""
    if dtype != torch.bfloat16:
        return f"its products are bfloat16, and the model's dtype is {dtype}".replace("torch.", "")
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        found, first = (".".join(map(str, pair)) for pair in (capability, CAPABILITY))
        return f"{device} has compute capability {found}, and FP8 products begin at {first}"
    try:
        error = max(_error(rows, device) for rows in ROWS)
    except Exception as raised:  # drivers and kernels raise whatever they like
        return f"torch's FP8 product fails on {device}: {first_line(raised)}"
    if not error <= TOLERANCE:
        return f"torch's FP8 product is off by {error:.2g} of a row's largest result on {device}"
    return None


def _error(num_rows: int, device: torch.device) -> float:
    """Return how far products are from products of the same numbers, widened to fp32."""
    generator = torch.Generator().manual_seed(num_rows)
    sizes = 10.0 ** torch.linspace(-3, 3, num_rows).unsqueeze(1)  # which one scale cannot cover
    x = (torch.randn(num_rows, INPUTS, generator=generator) * sizes).bfloat16().to(device)
    matrix = torch.randn(OUTPUTS, INPUTS, generator=generator)
    scales = 10.0 ** torch.linspace(-2, 1, OUTPUTS).unsqueeze(1)
    codes, scales = matrix.to(FLOAT8).to(device), scales.to(device)
    # As small as the products of the smallest row.
    bias = (1e-3 * torch.randn(OUTPUTS, generator=generator)).bfloat16().to(device)
    rows, row_scales = scale_rows(x)
    widened = (rows.float() * row_scales) @ (codes.float() * scales).t() + bias.float()
    found = float8_product(x, Float8Weight(codes, scales), bias).float()
    errors = (found - widened).abs().amax(-1) / widened.abs().amax(-1)
    return float(errors.max())
