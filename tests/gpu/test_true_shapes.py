"""A checkpoint of another shape computes what the small model computes that it was made from."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts
from tests.gpu.true_shapes import Shape, write_shape

# Roots of the factors of its sizes are whole, so that no weight is rounded.
SHAPE = Shape(hidden=1024, mlp=1024, layers=9, heads=16, kv_heads=8, head_dim=128, vocab=3 * 4096)


def test_logits_are_those_of_the_small_model(
    tmp_path: Path,
) -> None:
    source = DEMO / "target"
    out = write_shape(source, SHAPE, tmp_path / "out", torch.device("cpu"))
    (prompt,) = held_out_prompts(count=1, length=60)
    with torch.inference_mode():
        small, large = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(
                torch.tensor([list(prompt)])
            ).logits[0]
            for path in (source, out)
        )
    vocab = small.shape[-1]
    torch.testing.assert_close(large[:, :vocab], small, atol=1e-3, rtol=1e-3)
    assert bool((large.argmax(-1) < vocab).all()), "a copy is never the likeliest token"
