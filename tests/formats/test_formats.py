"""Quantised checkpoints say, token for token, what their library's own matrices say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specserve.errors import ModelError, UnsupportedModel
from specserve.models.checkpoints.library import read_config
from specserve.models.checkpoints.load import load_model
from specserve.models.checkpoints.weights import num_stored_parameters
from specserve.models.shard import Shard
from tests.formats.check import MADE, Said, say, say_on_ranks
from tests.formats.make import FORMATS
from tests.support import checkpoints

CLOSE = 1e-4  # of logits of 10 and more
KINDS = tuple(FORMATS)


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    said = say_on_ranks([MADE / kind for kind in KINDS], tmp_path_factory.mktemp("ranks"))
    return dict(zip(KINDS, said, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_says_what_its_library_s_matrices_say(
    kind: str, on_ranks: dict[str, Said]
) -> None:
    expected = Said.expected(MADE / kind)
    for said in (say(MADE / kind), on_ranks[kind]):
        assert said.difference(expected) < CLOSE
        assert said.tokens == expected.tokens


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_the_rows_and_columns_of_the_whole(kind: str) -> None:
    whole = load(MADE / kind).get_submodule("model.layers.0.mlp")
    shares = [
        load(MADE / kind, Shard(rank, 2)).get_submodule("model.layers.0.mlp") for rank in range(2)
    ]
    for name, dim in (("gate_proj", 0), ("down_proj", 1)):
        parts = [_weight(share, name) for share in shares]
        assert torch.equal(torch.cat(parts, dim), _weight(whole, name))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_counted_as_widened(kind: str) -> None:
    directory = MADE / kind
    plain = load(directory)
    assert num_stored_parameters(directory) == sum(p.numel() for p in plain.parameters())


def _weight(module: Any, name: str) -> Tensor:
    linear = getattr(module, name)
    weight: Tensor = getattr(linear, "inner", linear).weight
    return weight


def load(directory: Path, shard: Shard | None = None) -> Any:
    return load_model(
        directory, dtype=torch.float32, device="cpu", shard=shard, attention="eager"
    ).module


# What transformers itself widens


def edit(
    directory: Path, stated: dict[str, Any], change: Callable[[dict[str, Tensor]], None]
) -> None:
    """Change a checkpoint's tensors, and state how they are quantised."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = stated
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def library_says(directory: Path) -> Said:
    module: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([list(range(3, 23))])
    with torch.inference_mode():
        logits: Tensor = module(ids).logits[0, -1].float()
    return Said(logits, ())


def test_blocks_of_fp8_as_deepseek_and_qwen_publish_them(tmp_path: Path) -> None:
    checkpoints.make("qwen3", tmp_path)
    generator = torch.Generator().manual_seed(1)

    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            rows, columns = tensors[name].shape
            blocks = torch.rand(-(-rows // 32), -(-columns // 32), generator=generator) / 100
            tensors[f"{name}_scale_inv"] = blocks
            tensors[name] = (tensors[name] * 100).to(torch.float8_e4m3fn)

    stated = {"quant_method": "fp8", "weight_block_size": [32, 32], "dequantize": True}
    edit(tmp_path, stated, quantize)
    assert say(tmp_path).difference(library_says(tmp_path)) < CLOSE


def test_experts_of_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    checkpoints.make("gpt_oss", tmp_path)
    generator = torch.Generator().manual_seed(1)

    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, rows, columns = tensors.pop(name).shape
            shape = experts, columns, rows // 32, 16
            codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            exponents = torch.randint(120, 126, shape[:3], dtype=torch.uint8, generator=generator)
            tensors |= {f"{name}_blocks": codes, f"{name}_scales": exponents}

    edit(tmp_path, {"quant_method": "mxfp4"}, quantize)
    said = say(tmp_path)
    assert said.difference(library_says(tmp_path)) < CLOSE
    assert num_stored_parameters(tmp_path) == sum(p.numel() for p in load(tmp_path).parameters())


# What cannot be read


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ("int4", "quantization_config that is no object"),
        ({"quant_method": "hqq"}, "quantized by 'hqq', which specserve cannot read; it reads"),
        ({}, "quantized by 'None'"),
        ({"quant_method": "gptq", "bits": 3}, "gptq in 3 bits cannot be read; 2, 4, 8 can"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "layout 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "layout 'gemv'"),
        ({"quant_method": "awq", "group_size": "all"}, "group_size 'all'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "layout 'marlin-24'"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "2:4"}},
            "sparse weights",
        ),
        ({"quant_method": "fp8", "weight_block_size": [0]}, "weight_block_size"),
    ],
)
def test_what_cannot_be_read_is_refused_before_weights_are(
    stated: object, why: str, tmp_path: Path
) -> None:
    checkpoints.make("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    text = json.dumps({**config, "quantization_config": stated})
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(UnsupportedModel, match=why):
        read_config(tmp_path)


def test_codes_without_scales_are_refused(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((MADE / "gptq" / name).read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj.*scales"):
        load(tmp_path)


def test_loading_says_what_widening_costs(caplog: pytest.LogCaptureFixture) -> None:
    load(MADE / "int4-w4a16")
    assert "is quantized (compressed-tensors): its weights are widened to float32" in caplog.text
