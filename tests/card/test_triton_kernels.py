"""Triton's kernels: interpreted they compute what torch computes, and they compile for cards."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from specserve.models.attention import Rotation
from specserve.models.gpu.card_kernels import card_kernels
from tests.support.card import emulated_cards
from tests.support.card.kernels import interpreted_kernels

CARD = torch.device("cuda", 0)
pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dim", [16, 96, 128])
def test_q_and_k_are_rotated_and_k_and_v_written(dtype: torch.dtype, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 4 + 2 * 2, dim, generator=generator).to(dtype)
    q, k, v = torch.split(qkv, [4, 2, 2], dim=1)
    table = torch.randn(20, 2, 1, dim, generator=generator).to(dtype)
    positions, slots = torch.tensor([19, 0, 7]), torch.tensor([4, 31, 0])
    pools = [torch.randn(32, 2, dim, generator=generator).to(dtype) for _ in range(2)]
    rotation = Rotation(table, positions)
    expected = (
        rotation.apply(q),
        pools[0].index_copy(0, slots, rotation.apply(k)),
        pools[1].index_copy(0, slots, v),
    )
    with emulated_cards(), interpreted_kernels():
        kernels = card_kernels(CARD, dtype)
        assert kernels is not None
        on_card = qkv.to(CARD)
        written = [pool.to(CARD) for pool in pools]
        rotate: Any = kernels.rotate_and_write
        others = (table.to(CARD), positions.to(CARD), slots.to(CARD))
        found = rotate(*torch.split(on_card, [4, 2, 2], dim=1), *others, *written)
        for one, other in zip((found, *written), expected, strict=True):
            # The interpreter rounds products of bf16 elsewhere than torch.
            tolerance = 1e-5 if dtype == torch.float32 else 2**-4
            torch.testing.assert_close(one.cpu(), other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("width", [7, 1024, 1500])
def test_the_gate_is_the_product_of_silu_and_up(width: int) -> None:
    both = torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(0)).bfloat16()
    gate, up = both.chunk(2, dim=-1)
    with emulated_cards(), interpreted_kernels():
        kernels = card_kernels(CARD, torch.bfloat16)
        assert kernels is not None
        found = kernels.gated(both.to(CARD)).cpu()
    torch.testing.assert_close(found, F.silu(gate) * up)


@pytest.mark.parametrize("width", [7, 1024, 1500])
def test_the_norm_divides_by_the_root_of_the_mean_square(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(3, 2 * width, generator=generator)
    weight = torch.randn(width, generator=generator)
    expected = F.rms_norm(both[:, :width], (width,), weight, 1e-5)
    with emulated_cards(), interpreted_kernels():
        kernels = card_kernels(CARD, torch.float32)
        assert kernels is not None
        found = kernels.rms_norm(both.to(CARD)[:, :width], weight.to(CARD), 1e-5).cpu()
    torch.testing.assert_close(found, expected)


def test_wrong_kernels_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    wrong = lambda both: both[:, : both.shape[1] // 2] + 1  # noqa: E731
    with (
        emulated_cards(),
        interpreted_kernels(),
        mock.patch("specserve.models.gpu.triton_kernels.gated", wrong),
        caplog.at_level(logging.WARNING),
    ):
        assert card_kernels(CARD, torch.bfloat16) is None
    assert "off by" in caplog.text


def test_kernels_compile_for_three_generations_of_cards() -> None:
    """Compile in a process of its own: the interpreter leaves traces in Triton's language."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.card.compile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sm_") == 12
