"""Passes rounded up to shapes that recur give what the exact ones give; on a card, so do their captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from specserve.models.graphs import round_up
from specserve.models.layout import Geometry, Writes
from specserve.models.model import Placement, open_model
from specserve.models.runner import Runner
from specserve.types import Step
from tests.support import checkpoints

GEOMETRY = Geometry(page_size=16, kv_heads=2, block=128, device=torch.device("cpu"))
TEXT = tuple(np.random.default_rng(0).integers(3, checkpoints.VOCAB, 300).tolist())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("graphs") / "llama")


def runner(checkpoint: Path, device: str = "cpu", **options: object) -> Runner:
    return open_model(
        checkpoint,
        Placement(dtype="float32", device=device, pages=200, prefix_caching=False, **options),
    ).runner  # type: ignore[arg-type]


def decoded(model: Runner, lengths: Sequence[int], *, queries: int) -> torch.Tensor:
    """Prompts of these lengths, then two passes of `queries` tokens for all of them."""
    for seq_id, length in enumerate(lengths):
        model.run([Step(seq_id, 0, TEXT[:length])], [0])
    out = []
    for turn in range(2):
        starts = [length + turn * queries for length in lengths]
        out.append(
            model.run(
                [Step(i, start, TEXT[start : start + queries]) for i, start in enumerate(starts)],
                [queries] * len(lengths),
            )
        )
    return torch.cat(out).cpu()


def test_only_passes_of_few_equal_rows_are_rounded() -> None:
    table = np.zeros((3, 2), dtype=np.int64)
    even, odd = np.array([4, 4, 4]), np.array([4, 1, 4])
    rounded = round_up(Writes(np.array([9, 3, 20]), even, table), GEOMETRY)
    assert rounded is not None
    assert (len(rounded.counts), rounded.context, rounded.table.shape) == (4, 256, (4, 16))
    assert round_up(Writes(np.array([9, 3, 20]), odd, table), GEOMETRY) is None
    assert round_up(Writes(np.array([0]), np.array([40]), table[:1]), GEOMETRY) is None


@pytest.mark.parametrize("queries", [1, 5])
def test_rounded_passes_give_the_same_logits_and_spare_the_cache_of_others(
    checkpoint: Path, queries: int
) -> None:
    lengths = [7, 130, 255]
    exact, rounded = runner(checkpoint), runner(checkpoint)
    rounded.round_up = round_up
    torch.testing.assert_close(
        decoded(rounded, lengths, queries=queries),
        decoded(exact, lengths, queries=queries),
        atol=1e-4,
        rtol=1e-4,
    )
    rounded.cache.check()


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["invariant", "sdpa"])
@pytest.mark.parametrize("queries", [1, 5])
def test_captured_graphs_give_the_logits_of_the_processor(
    checkpoint: Path, attention: str, queries: int
) -> None:
    lengths = [7, 130, 255]
    on_card = decoded(runner(checkpoint, "cuda", attention=attention), lengths, queries=queries)
    torch.testing.assert_close(
        on_card, decoded(runner(checkpoint), lengths, queries=queries), atol=1e-2, rtol=1e-2
    )
