"""Write a tiny checkpoint of a family as it is released, and an INT8 copy of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.families.configs import FAMILIES, MULTIMODAL, TRANSPOSED_EXPERTS
from tests.support import checkpoints

INT8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        }
    },
}


def write(name: str, directory: Path, **changes: int) -> Path:
    """Write the checkpoint of a family, with some sizes of its text model changed."""
    configs = {**checkpoints.CONFIGS, **FAMILIES, **MULTIMODAL}
    config = MULTIMODAL[name]() if name in MULTIMODAL else configs[name]()
    text = config.get_text_config()
    for key, value in changes.items():
        if hasattr(text, key):
            setattr(text, key, value)
    if name not in MULTIMODAL:
        return checkpoints.write(config, directory)
    library: Any = AutoModelForImageTextToText
    model = library.from_config(config, dtype=torch.float32)
    checkpoints.randomise(model, torch.Generator().manual_seed(0))
    model.save_pretrained(directory)
    if name in TRANSPOSED_EXPERTS:
        _transpose_experts(directory)
    return directory


def _transpose_experts(directory: Path) -> None:
    """Store the matrices of experts as released files do, and not as the library writes them."""
    path = directory / "model.safetensors"
    tensors = {
        name: tensor.transpose(-1, -2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def reference(directory: Path) -> Any:
    """Return the library's own model of a checkpoint, with what sees if it has that."""
    config = json.loads((directory / "config.json").read_text())
    library: Any = (
        AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    )
    return library.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def write_int8(plain: Path, quantized: Path, widened: Path) -> bool:
    """Write two copies of a checkpoint: with INT8 matrices, and with what they stand for.

    Returns whether there are any: GPT-2 has no linear layers by that name.
    """
    for directory in (quantized, widened):
        shutil.copytree(plain, directory)
    names = _linear_names(plain)
    small, whole = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        whole[name] = small[name] = tensor
        if name in names:
            small[name], scale = _to_int8(tensor)
            small[f"{name}_scale"] = scale
            whole[name] = small[name].float() * scale
    save_file(small, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(whole, widened / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": INT8}))
    return bool(names)


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def _linear_names(directory: Path) -> set[str]:
    """Return the names in the file of the matrices of linear layers, the head's left out."""
    linears = {
        tuple(module.weight.shape)
        for name, module in reference(directory).named_modules()
        if isinstance(module, nn.Linear) and not name.endswith(("lm_head", "router", "gate"))
    }
    return {
        name
        for name, tensor in load_file(directory / "model.safetensors").items()
        if tuple(tensor.shape) in linears
        and not any(part in name for part in ("embed", "wte", "head", "visi", "gate.weight"))
    }
