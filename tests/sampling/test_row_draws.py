"""Draws from whole rows on a CPU: the kernel and torch's operations draw the same, to the bit."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve.sampling import row_draws
from specserve.sampling.noise import Purpose, exponential, row_keys
from specserve.sampling.row_draws import best_of_rows, draw_from_rows, draw_kernel_of

pytest.importorskip("llvmlite")

from specserve.sampling import compiled_draw

CPU = torch.device("cpu")
ROWS = 24


@pytest.fixture
def fresh_trial() -> Iterator[None]:
    draw_kernel_of.cache_clear()
    yield
    draw_kernel_of.cache_clear()


def keys_of(count: int) -> Tensor:
    return row_keys(range(count), [5], np.arange(count), Purpose.NEXT)


def rows_like(kind: str, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    normal = torch.randn(ROWS, vocab, generator=generator)
    return {
        "flat": lambda: normal.mul(0.1).softmax(-1),
        "peaked": lambda: normal.mul(20).softmax(-1),
        "few": lambda: normal.sub(2.5).clamp(min=0),
        "negative zeros": lambda: normal.clamp(max=0) * 0,
        "equal": lambda: torch.full((ROWS, vocab), 0.25),
        "one": lambda: torch.zeros(ROWS, vocab).index_fill_(1, torch.tensor(vocab - 1), 1e-30),
        "smallest": lambda: torch.full((ROWS, vocab), 1e-45),
        "subnormal": lambda: normal.abs().mul(1e-44),
        "not numbers": lambda: normal.clamp(min=0).sqrt() / (normal > -2),
        "from tiny to huge": lambda: torch.exp(40 * normal),
    }[kind]()


KINDS = [
    *("flat", "peaked", "few", "negative zeros", "equal", "one"),
    *("smallest", "subnormal", "not numbers", "from tiny to huge"),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [1, 15, 16, 1000, 8192, 20_001])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_draws_what_torch_draws_with_the_same_scores(
    kind: str, vocab: int, threads: int
) -> None:
    weights, keys = rows_like(kind, vocab), keys_of(ROWS)
    rows = torch.arange(ROWS).flip(0)
    torch.set_num_threads(threads)  # the session's fixture sets it back
    try:
        for chosen in (None, rows):
            expected = row_draws._draw_by_torch(weights, keys, chosen, 7)
            scores, tokens = compiled_draw.draw_rows(weights, keys, chosen, 7)
            assert torch.equal(tokens, expected[1])
            torch.testing.assert_close(scores, expected[0], rtol=0, atol=0, equal_nan=True)
    finally:
        torch.set_num_threads(1)


def test_a_score_just_above_the_best_wins_and_the_first_of_a_tie() -> None:
    keys = keys_of(ROWS)
    noise = exponential(keys, torch.arange(30_000, dtype=torch.int32))
    later = noise[:, 16:].argmin(1, keepdim=True) + 16  # where bounds are nearest to scores
    first = torch.zeros(ROWS, dtype=torch.int64)
    for factor, token in ((1 + 1e-6, later[:, 0]), (1, first), (1 - 1e-6, first)):
        weights = torch.zeros(noise.shape)
        weights[:, 0] = noise[:, 0]
        weights.scatter_(1, later, factor * noise.gather(1, later))
        assert torch.equal(draw_from_rows(weights, keys), token)


def test_the_kernels_noise_has_the_bits_of_torchs() -> None:
    keys = keys_of(40_000)
    noise = exponential(keys, torch.tensor([3], dtype=torch.int32))[:, 0]
    scores, _ = best_of_rows(torch.ones(len(keys), 1), keys, first_id=3)
    assert torch.equal(scores, 1 / noise)


def test_parts_of_a_row_in_memory_have_the_draw_of_the_whole_row() -> None:
    weights, keys = rows_like("flat", 5000), keys_of(ROWS)
    parts = [best_of_rows(weights[:, a:b], keys, first_id=a) for a, b in ((0, 1700), (1700, 5000))]
    scores, tokens = (torch.stack(both) for both in zip(*parts, strict=True))
    found = tokens.gather(0, scores.argmax(0)[None])[0]
    assert torch.equal(found, draw_from_rows(weights, keys))


@pytest.mark.usefixtures("fresh_trial")
def test_without_llvmlite_torch_draws(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights, keys = rows_like("few", 1000), keys_of(ROWS)
    expected = draw_from_rows(weights, keys)
    draw_kernel_of.cache_clear()
    imported = builtins.__import__

    def refuse(name: str, *given: Any) -> Any:
        if name.startswith("specserve.sampling") and "compiled_draw" in (given[2] or ()):
            raise ImportError("No module named 'llvmlite'")
        return imported(name, *given)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with caplog.at_level(logging.INFO):
        assert draw_kernel_of(CPU) is None
    assert "No module named 'llvmlite'" in caplog.text
    assert torch.equal(draw_from_rows(weights, keys), expected)


@pytest.mark.usefixtures("fresh_trial")
def test_a_kernel_that_draws_other_tokens_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(
        weights: Tensor, keys: Tensor, rows: Tensor | None, first_id: int
    ) -> tuple[Tensor, Tensor]:
        scores, tokens = row_draws._draw_by_torch(weights, keys, rows, first_id)
        return scores, tokens + 1

    with mock.patch.object(compiled_draw, "draw_rows", wrong):
        assert draw_kernel_of(CPU) is None
    assert "other tokens" in caplog.text
