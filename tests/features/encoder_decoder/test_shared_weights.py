"""Shared weights of encoder-decoders: the bits of private ones, and no checkpoint read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specserve.models.checkpoints import store as store_module
from specserve.models.cpu.mapped_file import can_map
from specserve.models.model import ModelOptions, open_model
from specserve.types import Step
from tests.support import checkpoints
from tests.support.weight_reads import recorded_reads

DTYPES = ["float32"] + ["bfloat16"] * torch.ops.mkldnn._is_mkldnn_bf16_supported()
TEXT = tuple(range(4, 44))

pytestmark = pytest.mark.skipif(not can_map(), reason="weights cannot be mapped here")


def logits(directory: Path, dtype: str, *, shares_weights: bool) -> Tensor:  # [rows, vocab]
    options = ModelOptions(dtype=dtype, device="cpu", pages=40, shares_weights=shares_weights)
    return open_model(directory, options).runner.run([Step(0, 0, TEXT, TEXT)], [len(TEXT)])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, DTYPES[-1]) for name in checkpoints.ENCODER_DECODERS), ("t5", DTYPES[0])],
)
def test_shared_weights_give_the_bits_of_private_ones(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "default_directory", lambda: tmp_path / "shared")
    directory = checkpoints.write(checkpoints.ENCODER_DECODERS[name](), tmp_path / name)
    expected = logits(directory, dtype, shares_weights=False)
    with recorded_reads() as reads:
        assert torch.equal(logits(directory, dtype, shares_weights=True), expected)
        assert reads
        reads.clear()
        assert torch.equal(logits(directory, dtype, shares_weights=True), expected)
        assert not reads
