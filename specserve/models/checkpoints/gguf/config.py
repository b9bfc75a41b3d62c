"""The library's config of a GGUF file, from all that its metadata state of the numbers.

What transformers makes of such a file leaves out factors of rotary frequencies, the width of heads,
windows and caps of logits, and it takes other models' values for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specserve.errors import UnsupportedModel
from specserve.models.checkpoints.gguf.header import Header
from specserve.models.checkpoints.library import llama_rotary, make_config

MODEL_TYPES = {"gemma3": "gemma3_text"}
"""Names of the library that are not llama.cpp's."""
SIZES = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""Keys of the config, and what every file states them as."""
TOKENS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Tokens that end a text, a turn and a message."""
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROTARY_FACTORS = "rope_freqs.weight"
DEFAULT_BASE = 10_000.0
"""llama.cpp's base of rotary frequencies, and the base of Gemma 3's layers with a window."""
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What all releases of Llama 3 state; a GGUF file has the frequencies' factors instead."""
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of those whose queries are scaled as if heads shared the hidden size, as no file says."""


def gguf_config(header: Header) -> Any:
    """Return the config. Raises UnsupportedModel for what it cannot express."""
    keys = {key: _stated(header, name) for key, name in SIZES.items()}
    heads = keys["num_attention_heads"]
    width = header.get("attention.key_length", keys["hidden_size"] // heads)
    keys |= {
        "num_key_value_heads": header.get("attention.head_count_kv", heads),
        "vocab_size": header.tensors[EMBEDDING].shape[0] if EMBEDDING in header.tensors else 0,
        "tie_word_embeddings": HEAD not in header.tensors,
        "rope_parameters": _rotary(header, width),
        **{key: header.values.get(f"tokenizer.ggml.{name}") for key, name in TOKENS.items()},
    }
    if header.architecture != "qwen2":  # whose heads share the hidden size
        keys["head_dim"] = width
    if header.architecture.startswith("gemma"):
        keys |= _gemma(header, keys)
    if header.architecture == "phi3":
        keys["sliding_window"] = header.get("attention.sliding_window") or None
    config = make_config(MODEL_TYPES.get(header.architecture, header.architecture), keys)
    if ROTARY_FACTORS in header.tensors:
        _set_llama3(config, header)
    return config


def end_ids(header: Header) -> list[int]:
    """Return the tokens that end a text."""
    stated = (header.values.get(f"tokenizer.ggml.{name}") for name in ENDS)
    return sorted({token for token in stated if token is not None})


def _stated(header: Header, name: str) -> Any:
    if (value := header.get(name)) is None:
        raise UnsupportedModel(f"{header.file} does not state {header.architecture}.{name}")
    return value


def _gemma(header: Header, keys: dict[str, Any]) -> dict[str, Any]:
    is_largest = keys["num_hidden_layers"] == LARGEST_GEMMA[header.architecture]
    shared = keys["hidden_size"] // keys["num_attention_heads"]
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        "sliding_window": _stated(header, "attention.sliding_window"),
        "query_pre_attn_scalar": shared if is_largest else keys["head_dim"],
        **{name: header.get(name) for name in names if header.get(name) is not None},
    }


def _rotary(header: Header, width: int) -> dict[str, Any]:
    """Return the rotary parameters. A Gemma 3 scales its full attention's only."""
    kind = header.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise UnsupportedModel(
            f"{header.file} scales its rotary frequencies by {str(kind)[:40]!r}, which is not read "
            "from GGUF"
        )
    parameters = {"rope_type": "default", "rope_theta": header.get("rope.freq_base", DEFAULT_BASE)}
    if kind == "linear":
        parameters |= {"rope_type": "linear", "factor": _stated(header, "rope.scaling.factor")}
    rotated = header.get("rope.dimension_count", width)
    if header.architecture == "phi3":
        parameters["partial_rotary_factor"] = rotated / width
    elif rotated != width:
        raise UnsupportedModel(
            f"{header.file} rotates {rotated} of the {width} numbers of a head, which "
            f"{header.architecture} of transformers cannot"
        )
    if header.architecture != "gemma3":
        return parameters
    base = header.get("rope.freq_base_swa", DEFAULT_BASE)
    windowed = {"rope_type": "default", "rope_theta": base}
    return {"full_attention": parameters, "sliding_attention": windowed}


def _set_llama3(config: Any, header: Header) -> None:
    """Set the rotary parameters of Llama 3 if the file's factors are those that they imply."""
    place = header.tensors[ROTARY_FACTORS]
    data = np.memmap(header.file, np.float32, "r", place.offset, place.shape)
    factors = torch.from_numpy(np.array(data))
    plain: Any = llama_rotary(config).inv_freq
    config.rope_parameters.update(LLAMA3, factor=float(factors.max()))
    scaled: Any = llama_rotary(config).inv_freq
    if len(plain) != len(factors) or not torch.allclose(scaled, plain / factors, rtol=1e-5, atol=0):
        raise UnsupportedModel(
            f"{header.file} scales its rotary frequencies ({ROTARY_FACTORS}) in another way than "
            "Llama 3, which is not read from GGUF"
        )
