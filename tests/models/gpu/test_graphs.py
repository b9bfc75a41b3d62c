"""Passes padded to bucketed shapes give the exact logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specserve.models.gpu.graphs import pad_to_bucket
from specserve.models.layout import Geometry, Writes
from specserve.models.model import ModelOptions, open_model
from specserve.models.runner import Runner
from specserve.types import Step
from tests.support import checkpoints

GEOMETRY = Geometry(page_size=16, kv_heads=2, key_block=128, device=torch.device("cpu"))
TEXT = tuple(np.random.default_rng(0).integers(3, checkpoints.VOCAB, 300).tolist())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("graphs") / "llama")


def runner(checkpoint: Path, device: str = "cpu", **options: Any) -> Runner:
    return open_model(
        checkpoint,
        ModelOptions(dtype="float32", device=device, pages=200, prefix_caching=False, **options),
    ).runner


def decoded(model: Runner, lengths: Sequence[int], *, queries: int) -> torch.Tensor:
    """Return logits of two passes of `queries` tokens each, after prompts of these lengths."""
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


def test_only_passes_of_few_equal_rows_are_padded() -> None:
    block_table = np.zeros((3, 2), dtype=np.int64)
    even, odd = np.array([4, 4, 4]), np.array([4, 1, 4])
    padded = pad_to_bucket(Writes(np.array([9, 3, 20]), even, block_table), GEOMETRY)
    assert padded is not None
    assert (len(padded.counts), padded.context, padded.block_table.shape) == (4, 256, (4, 16))
    assert pad_to_bucket(Writes(np.array([9, 3, 20]), odd, block_table), GEOMETRY) is None
    assert pad_to_bucket(Writes(np.array([0]), np.array([40]), block_table[:1]), GEOMETRY) is None


@pytest.mark.parametrize("queries", [1, 5])
def test_padded_passes_give_the_same_logits_and_leave_other_sequences_cache_alone(
    checkpoint: Path, queries: int
) -> None:
    lengths = [7, 130, 255]
    exact, padded = runner(checkpoint), runner(checkpoint)
    padded.pad_to_bucket = pad_to_bucket
    torch.testing.assert_close(
        decoded(padded, lengths, queries=queries),
        decoded(exact, lengths, queries=queries),
        atol=1e-4,
        rtol=1e-4,
    )
    padded.cache.check()
