"""Draws from whole rows: the kernel of a card makes the CPU's draws, or is not used."""

from __future__ import annotations

import logging
from unittest import mock

import numpy as np
import pytest
import torch

from specserve.sampling import row_draws
from specserve.sampling.noise import Purpose, row_keys
from specserve.sampling.row_draws import best_of_rows, draw_from_rows, draw_kernel_of
from tests.support.card import emulated_cards
from tests.support.card.kernels import interpreted_kernels
from tests.support.card.noise import count_unequal

CARD = torch.device("cuda", 0)
pytest.importorskip("triton")


def test_one_kernel_draws_what_the_cpu_draws() -> None:
    weights = torch.randn(12, 3001, generator=torch.Generator().manual_seed(3)).softmax(-1)
    weights[5] = 0  # a row without weights
    keys = row_keys(range(9), [2], np.arange(9), Purpose.NEXT)
    rows = torch.tensor([11, 0, 5, 5, 3, 2, 1, 7, 8])
    expected = draw_from_rows(weights, keys, rows)
    with emulated_cards() as ledger, interpreted_kernels():
        assert draw_kernel_of(CARD) is not None
        on_card = [part.to(CARD) for part in (weights, keys, rows)]
        ledger.clear()
        tokens = draw_from_rows(*on_card)
        assert ledger.kernels["draw_kernel"] == 1
        assert ledger.num_waits == 0
        assert tokens.tolist() == expected.tolist()


def test_parts_of_a_row_have_the_draw_of_the_whole_row() -> None:
    weights = torch.randn(6, 500, generator=torch.Generator().manual_seed(4)).softmax(-1)
    keys = row_keys(range(6), [1], np.arange(6), Purpose.COUPLED)
    expected = draw_from_rows(weights, keys)
    bounds = ((0, 170), (170, 340), (340, 500))
    on_cpu = [best_of_rows(weights[:, a:b], keys, first_id=a) for a, b in bounds]
    with emulated_cards(), interpreted_kernels():
        on_card = [
            best_of_rows(weights[:, a:b].to(CARD), keys.to(CARD), first_id=a) for a, b in bounds
        ]
        assert draw_kernel_of(CARD) is not None
        found = [(scores.cpu(), tokens.cpu()) for scores, tokens in on_card]
    for parts in (on_cpu, found):
        scores, tokens = (torch.stack(both) for both in zip(*parts, strict=True))
        assert torch.equal(tokens.gather(0, scores.argmax(0)[None])[0], expected)


def test_the_kernels_noise_has_the_bits_of_the_cpus() -> None:
    assert count_unequal(4) == 0


def test_every_row_is_meant_without_numbers() -> None:
    weights = torch.rand(4, 50, generator=torch.Generator().manual_seed(0))
    keys = row_keys(range(4), [0], np.arange(4), Purpose.NEXT)
    every = draw_from_rows(weights, keys, torch.arange(4))
    assert torch.equal(draw_from_rows(weights, keys), every)
    with emulated_cards(), interpreted_kernels():
        assert draw_from_rows(weights.to(CARD), keys.to(CARD)).tolist() == every.tolist()


def test_a_kernel_that_draws_other_tokens_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(
        weights: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor, first_id: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores, tokens = row_draws._draw_by_torch(weights, keys, rows, first_id)
        return scores, tokens + 1

    with (
        emulated_cards(),
        interpreted_kernels(),
        mock.patch("specserve.sampling.triton_draw.draw_rows", wrong),
        caplog.at_level(logging.WARNING),
    ):
        assert draw_kernel_of(CARD) is None
    assert "other tokens" in caplog.text


def test_a_kernel_that_cannot_be_built_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    failing = mock.Mock(side_effect=RuntimeError("Failed to find C compiler\nand more"))
    with (
        emulated_cards(),
        interpreted_kernels(),
        mock.patch("specserve.sampling.triton_draw.draw_rows", failing),
        caplog.at_level(logging.WARNING),
    ):
        assert draw_kernel_of(CARD) is None
    assert "Failed to find C compiler" in caplog.text
