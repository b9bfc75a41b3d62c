"""Widening: the same function at the requested size, in a checkpoint that others can load.

Invalid requests fail before anything is written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from specserve.errors import BadValue, ModelError, ModelNotFound, UnsupportedModel
from specserve.models.checkpoints import writer
from specserve.models.checkpoints.widen import inflate

ASKED = 900_000


def save_llama(
    directory: Path, *, tied: bool, shard_size: str = "1GB", dtype: torch.dtype = torch.float32
) -> Path:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,  # not a multiple of 64
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        mlp_bias=True,
        initializer_range=0.2,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard_size)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "notes.bin").write_text("not a part of the model")
    return directory


def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        answer: torch.Tensor = model(torch.arange(0, 200, 7)[None]).logits
    return answer


def num_parameters(directory: Path) -> int:
    return int(AutoModelForCausalLM.from_pretrained(directory).num_parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_a_widened_model_computes_the_same_and_has_the_size_that_was_asked(
    tmp_path: Path, tied: bool
) -> None:
    source, out = save_llama(tmp_path / "small", tied=tied), tmp_path / "wide"
    reached = inflate(source, ASKED, out)
    assert abs(reached - ASKED) < 0.05 * ASKED
    assert reached == num_parameters(out) > 2 * num_parameters(source)
    assert json.loads((out / "config.json").read_text())["intermediate_size"] % 64 == 0
    before = logits(source)
    assert before.std() > 0.5
    torch.testing.assert_close(logits(out), before, rtol=0, atol=1e-5)


def test_the_new_columns_do_real_work_that_is_the_same_in_every_copy(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "small", tied=True)
    for name in ("one", "two"):
        inflate(source, ASKED, tmp_path / name)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(tensor.equal(two[name]) for name, tensor in one.items())
    gates = [
        one[f"model.layers.{layer}.mlp.{side}_proj.weight"][96:]
        for layer in (0, 1)
        for side in ("gate", "up")
    ]
    assert all(0.015 < gate.std() < 0.025 for gate in gates)
    assert len({float(gate[0, 0]) for gate in gates}) == 4
    assert not one["model.layers.1.mlp.down_proj.weight"][:, 96:].any()


def test_sharded_checkpoints_are_read_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = save_llama(tmp_path / "small", tied=False, shard_size="100KB"), tmp_path / "wide"
    assert len(list(source.glob("*.safetensors"))) > 2
    (source / "consolidated.safetensors").write_text(
        "the same weights in another layout, not in the index"
    )
    monkeypatch.setattr(writer, "SHARD_BYTES", 1_000_000)
    inflate(source, ASKED, out)
    sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) < 1_010_000
    torch.testing.assert_close(logits(out), logits(source), rtol=0, atol=1e-5)


def test_dtype_and_companions_are_kept_and_the_card_says_what_it_is(tmp_path: Path) -> None:
    source, out = save_llama(tmp_path / "small", tied=True, dtype=torch.bfloat16), tmp_path / "wide"
    reached = inflate(source, ASKED, out)
    with safe_open(out / "model.safetensors", framework="pt") as file:
        names = file.keys()  # a safetensors file is no mapping
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    written = {path.name for path in out.iterdir()}
    assert written == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "README.md",
        "tokenizer.json",
    }
    assert f"small, widened to {reached:,} parameters" in (out / "README.md").read_text()


def test_the_models_own_size_can_be_asked_for_and_less_cannot(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "small", tied=True)
    own = num_parameters(source)
    assert own <= inflate(source, own, tmp_path / "same") < 1.3 * own
    with pytest.raises(BadValue, match=f"{own:,}"):
        inflate(source, own - 1, tmp_path / "less")
    assert not (tmp_path / "less").exists()


def test_a_directory_with_something_in_it_is_not_written_to(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "small", tied=True)
    with pytest.raises(BadValue, match="not empty"):
        inflate(source, ASKED, source)


def test_models_without_gated_mlps_are_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnsupportedModel, match="gpt2 cannot be widened"):
        inflate(tmp_path / "gpt2", ASKED, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, "every MLP"),
        ({"intermediate_size": 97}, "intermediate size"),
        ({"quantization_config": {}}, "quantized"),
    ],
)
def test_models_of_which_only_a_part_could_be_widened_are_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    source = save_llama(tmp_path / "small", tied=True)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnsupportedModel, match=message):
        inflate(source, ASKED, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model directory"):
        inflate(tmp_path / "nothing", ASKED, tmp_path / "out")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        inflate(tmp_path, ASKED, tmp_path / "out")
