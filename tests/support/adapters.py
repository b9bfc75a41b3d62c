"""Tiny low-rank adapters in PEFT's layout, and targets into which they are merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specserve.types import Adapter

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MEBIBYTE = 1 << 20


def config_keys(*, rank: int = 4, alpha: float = 6, **keys: Any) -> dict[str, Any]:
    """Return the keys of adapter_config.json as PEFT writes them."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/base",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layer_replication": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": ["q_proj", "v_proj"],
        **keys,
    }


def write_adapter(
    target: Path,
    directory: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    only: str = "",
    strength: float = 1.0,
    **keys: Any,
) -> Adapter:
    """Write an adapter with random factors for those layers of a target that `only` is part of."""
    from specserve.features.adapters.files import read_adapter
    from specserve.features.adapters.layers import adaptable_layers

    config = config_keys(rank=rank, **keys)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in adaptable_layers(target).items():
        if only not in name:
            continue
        own = next((n for part, n in config["rank_pattern"].items() if part in name), rank)
        a = torch.randn(own, layer.inputs, generator=generator) * layer.inputs**-0.5
        b = torch.randn(layer.outputs, own, generator=generator) * strength
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    directory.mkdir(parents=True)
    (directory / CONFIG_FILE).write_text(json.dumps(config))
    save_file(tensors, directory / WEIGHTS_FILE)
    return read_adapter(directory.name, str(directory))


def merge(target: Path, adapter: Adapter, out: Path) -> Path:
    """Write the target with W + scale * B A in place of W, computed as PEFT merges adapters."""
    config = json.loads(Path(adapter.path, CONFIG_FILE).read_text())
    tensors = load_file(Path(adapter.path, WEIGHTS_FILE))
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for name, module in model.named_modules():
        key = f"base_model.model.{name}.lora_"
        if f"{key}A.weight" not in tensors:
            continue
        a, b = (tensors.pop(f"{key}{factor}.weight").double() for factor in "AB")
        change = b @ a * _scale(config, name, len(a))
        with torch.no_grad():
            module.weight += change.T if type(module).__name__ == "Conv1D" else change
    assert not tensors
    model.save_pretrained(out)
    if (target / "tokenizer.json").exists():
        for path in target.glob("tokenizer*"):
            shutil.copy(path, out)
    return out


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    alpha = next(
        (n for part, n in config["alpha_pattern"].items() if part in name), config["lora_alpha"]
    )
    return float(alpha / (rank**0.5 if config["use_rslora"] else rank))
