"""The files of an EAGLE-3 head that was trained here, as SpecForge writes them.

Other engines open them as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specserve.errors import ModelError
from specserve.features.eagle.checkpoint import NUM_TAPS, EagleWeights
from specserve.features.eagle.head_config import FINGERPRINT, EagleInfo
from specserve.features.eagle.train_heads import (
    Teacher,
)
from specserve.features.eagle.trainable_head import EagleModule

FILE_NUMBERS = torch.bfloat16


def save_head(
    head: EagleModule,
    config: Any,
    taps: Sequence[int],
    ids: Tensor,
    target: str,
    vocab_size: int,
    directory: Path,
) -> None:
    """Save a head in the files of SpecForge, without the embedding, which is the target's."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().cpu().to(FILE_NUMBERS).contiguous()
        for name, tensor in head.named_parameters()
    }
    if len(ids) != vocab_size:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, value=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    keys = _config_keys(head, config, taps, num_ids=len(ids), target=target, vocab_size=vocab_size)
    (directory / "config.json").write_text(json.dumps(keys, indent=2) + "\n")


def _config_keys(
    head: EagleModule,
    config: Any,
    taps: Sequence[int],
    *,
    num_ids: int,
    target: str,
    vocab_size: int,
) -> dict[str, Any]:
    """Return the keys of a head's config.json, in the names of SpecForge."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "draft_vocab_size": num_ids,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in taps],  # by their outputs
            "use_aux_hidden_state": True,
        },
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "target_hidden_size": head.fc.in_features // NUM_TAPS,
        FINGERPRINT: target,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
    }


def load_head(config: Any, teacher: Teacher, directory: Path) -> tuple[EagleModule, Tensor]:
    """Return a head that `save_head` wrote, and the target's ids of the tokens that it knows."""
    ids = _saved_ids(directory)
    head = EagleModule(config, target_hidden=teacher.spec.hidden_size, draft_vocab=len(ids))
    _load(head, directory)
    return head, ids


def _saved_ids(directory: Path) -> Tensor:
    """Return the target's ids of the tokens that a saved head knows."""
    weights = EagleWeights(directory, EagleInfo.from_directory(directory))
    ids = weights.target_ids()
    return torch.arange(weights.draft_vocab_size) if ids is None else ids


@torch.no_grad()
def _load(head: EagleModule, directory: Path) -> None:
    """Read the weights of a head that `save_head` wrote."""
    stored = load_file(directory / "model.safetensors")
    for name, parameter in head.named_parameters():
        if name not in stored or stored[name].shape != parameter.shape:
            raise ModelError(
                f"the head at {directory} was not trained by `specserve eagle` for this target; "
                "leave --resume out"
            )
        parameter.copy_(stored[name].float())
