"""Experts by the names and shapes of released files: whole, and shared by two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families.check import (
    is_close,
    logits,
    open_runner,
    ranks_agree,
    reference_logits,
)
from tests.families.make import write

QWEN3_MOE = {
    "model.layers.0.self_attn.q_proj.weight": [64, 64],
    "model.layers.0.self_attn.k_proj.weight": [32, 64],
    "model.layers.0.self_attn.q_norm.weight": [16],
    "model.layers.0.mlp.gate.weight": [4, 64],
    "model.layers.0.mlp.experts.3.gate_proj.weight": [32, 64],
    "model.layers.0.mlp.experts.3.up_proj.weight": [32, 64],
    "model.layers.0.mlp.experts.3.down_proj.weight": [64, 32],
    "model.layers.1.mlp.gate_proj.weight": [96, 64],
}
GPT_OSS = {
    "model.layers.0.self_attn.q_proj.bias": [64],
    "model.layers.0.self_attn.sinks": [4],
    "model.layers.0.mlp.router.weight": [4, 64],
    "model.layers.0.mlp.router.bias": [4],
    "model.layers.0.mlp.experts.gate_up_proj_blocks": [4, 192, 2, 16],
    "model.layers.0.mlp.experts.gate_up_proj_scales": [4, 192, 2],
    "model.layers.0.mlp.experts.gate_up_proj_bias": [4, 192],
    "model.layers.0.mlp.experts.down_proj_blocks": [4, 64, 3, 16],
    "model.layers.0.mlp.experts.down_proj_scales": [4, 64, 3],
    "model.layers.0.mlp.experts.down_proj_bias": [4, 64],
}
GRANITE_MOE = {
    "model.layers.0.block_sparse_moe.input_linear.weight": [4, 192, 64],
    "model.layers.0.block_sparse_moe.output_linear.weight": [4, 64, 96],
    "model.layers.0.block_sparse_moe.router.layer.weight": [4, 64],
}
DEEPSEEK_V3 = {
    "model.layers.1.self_attn.q_a_proj.weight": [16, 64],
    "model.layers.1.self_attn.q_b_proj.weight": [96, 16],
    "model.layers.1.self_attn.kv_a_proj_with_mqa.weight": [24, 64],
    "model.layers.1.self_attn.kv_b_proj.weight": [112, 16],
    "model.layers.1.mlp.gate.e_score_correction_bias": [4],
    "model.layers.1.mlp.experts.3.gate_proj.weight": [16, 64],
    "model.layers.1.mlp.shared_experts.up_proj.weight": [16, 64],
}
BLOCK = 32


def shapes(directory: Path) -> dict[str, list[int]]:
    tensors = load_file(directory / "model.safetensors")
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("name", "released"),
    [("qwen3_moe", QWEN3_MOE), ("granitemoe", GRANITE_MOE), ("deepseek_v3", DEEPSEEK_V3)],
)
def test_experts_as_released_are_shared_by_two_ranks(
    one_thread: None, name: str, released: dict[str, list[int]], tmp_path: Path
) -> None:
    directory = write(name, tmp_path / name)
    assert shapes(directory).items() >= released.items()
    expected = reference_logits(directory)
    assert is_close(logits(open_runner(directory)), expected)
    assert ranks_agree(directory, expected)


def test_gpt_oss_as_released_in_mxfp4_is_shared_by_two_ranks(
    one_thread: None, tmp_path: Path
) -> None:
    """Half a matrix has 48 rows here, so that ranks divide a block of 32."""
    directory = write("gpt_oss", tmp_path / "gpt_oss")
    to_mxfp4(directory)
    assert shapes(directory).items() >= GPT_OSS.items()
    expected = logits(open_runner(directory))
    assert expected.std() > 1
    assert ranks_agree(directory, expected)


def to_mxfp4(directory: Path) -> None:
    """Replace the experts' matrices by random blocks, as OpenAI's files have them."""
    path, generator = directory / "model.safetensors", torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor
            continue
        experts, rows, columns = tensor.shape
        shape = experts, columns, rows // BLOCK, BLOCK // 2
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, shape, dtype=torch.uint8, generator=generator
        )
        tensors[f"{name}_scales"] = torch.randint(
            120, 126, shape[:3], dtype=torch.uint8, generator=generator
        )
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    stated = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    (directory / "config.json").write_text(json.dumps(stated))
