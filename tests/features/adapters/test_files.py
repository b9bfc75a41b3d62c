"""An adapter's files are read as PEFT writes them; what is not computed here is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.errors import AdapterError
from specserve.features.adapters.files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterFiles,
    read_adapter,
)
from specserve.features.adapters.layers import adaptable_layers
from tests.support import checkpoints
from tests.support.adapters import config_keys, write_adapter

QUERY = "base_model.model.model.layers.0.self_attn.q_proj."


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("target") / "llama")


@pytest.fixture
def directory(target: Path, tmp_path: Path) -> Path:
    write_adapter(target, tmp_path / "adapter", only="q_proj")
    return tmp_path / "adapter"


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, directory / WEIGHTS_FILE)


def test_rank_and_scale_follow_the_config_and_its_patterns(target: Path, tmp_path: Path) -> None:
    write_adapter(
        target,
        tmp_path / "own",
        rank_pattern={"v_proj": 9},
        alpha_pattern={"v_proj": 18},
        use_rslora=True,
    )
    changes = AdapterFiles.open(tmp_path / "own").changes
    values, queries = (changes[f"model.layers.1.self_attn.{name}"] for name in ("v_proj", "q_proj"))
    assert (values.rank, values.scale) == (9, 18 / 3)
    assert (queries.rank, queries.scale) == (4, 6 / 2)
    assert (values.outputs, values.inputs) == (32, 64)


def test_another_file_is_another_version(directory: Path) -> None:
    before = read_adapter("a", str(directory))
    assert read_adapter("a", str(directory)) == before
    rewrite(directory, lambda tensors: tensors[f"{QUERY}lora_A.weight"].add_(1e-3))
    assert read_adapter("a", str(directory)).version != before.version


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"peft_type": "IA3"}, "kind IA3; only LORA"),
        ({"task_type": "SEQ_CLS"}, "for SEQ_CLS"),
        ({"bias": "all"}, "trains biases"),
        ({"use_dora": True}, "has DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layer_replication": [[0, 2]]}, "repeated layers"),
        ({"init_lora_weights": "pissa"}, "initialised with pissa"),
        ({"lora_alpha": "six"}, "lora_alpha 'six'"),
        ({"rank": 8}, "states the rank 8"),
    ],
)
def test_what_is_no_plain_lora_is_refused_in_one_sentence(
    directory: Path, keys: dict[str, Any], message: str
) -> None:
    (directory / CONFIG_FILE).write_text(json.dumps(config_keys(**keys)))
    with pytest.raises(AdapterError, match=message) as raised:
        AdapterFiles.open(directory)
    assert "\n" not in str(raised.value)


def test_files_that_are_missing_or_broken_are_named(directory: Path) -> None:
    weights = (directory / WEIGHTS_FILE).read_bytes()
    (directory / WEIGHTS_FILE).write_bytes(weights[:40])
    with pytest.raises(AdapterError, match="cannot be read as safetensors"):
        AdapterFiles.open(directory)
    (directory / WEIGHTS_FILE).unlink()
    with pytest.raises(AdapterError, match="save the adapter as safetensors"):
        AdapterFiles.open(directory)
    (directory / CONFIG_FILE).write_text("[")
    with pytest.raises(AdapterError, match="is not JSON"):
        AdapterFiles.open(directory)
    shutil.rmtree(directory)
    with pytest.raises(AdapterError, match="No such file"):
        read_adapter("a", str(directory))


def test_tensors_of_another_kind_and_half_pairs_are_refused(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update(lora_magnitude_vector=torch.ones(1)))
    with pytest.raises(AdapterError, match="the tensor lora_magnitude_vector"):
        AdapterFiles.open(directory)
    rewrite(directory, lambda tensors: tensors.pop("lora_magnitude_vector"))
    rewrite(directory, lambda tensors: tensors.pop(f"{QUERY}lora_B.weight"))
    with pytest.raises(AdapterError, match="no matching pair"):
        AdapterFiles.open(directory)


def test_an_adapter_of_another_base_is_refused(target: Path, tmp_path: Path) -> None:
    layers = adaptable_layers(target)
    other = checkpoints.make("llama_four_kv_heads", tmp_path / "other")
    write_adapter(other, tmp_path / "wider", only="k_proj")
    with pytest.raises(AdapterError, match=r"k_proj as 64 x 64, and the target's is 32 x 64"):
        AdapterFiles.open(tmp_path / "wider").require_fits(layers)
    gpt2 = checkpoints.make("gpt2", tmp_path / "gpt2")
    write_adapter(gpt2, tmp_path / "named", only="attn.c_attn")
    with pytest.raises(AdapterError, match=r"transformer.h.0.attn.c_attn, which is no layer"):
        AdapterFiles.open(tmp_path / "named").require_fits(layers)


def test_head_embedding_and_experts_are_not_adaptable(target: Path, tmp_path: Path) -> None:
    assert {name.rpartition(".")[2] for name in adaptable_layers(target)} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    experts = checkpoints.make("qwen3_moe", tmp_path / "experts")
    assert not any(".experts" in name for name in adaptable_layers(experts))
    with pytest.raises(AdapterError, match="decoder-only"):
        adaptable_layers(checkpoints.write(checkpoints.ENCODER_DECODERS["t5"](), tmp_path / "t5"))
