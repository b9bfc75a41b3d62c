"""The decoders that run here, and the reason for each that does not. Knows configs; no weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specserve.errors import UnsupportedModel

LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "chunked_attention"}
"""Layer types with a KV cache; others keep a state that is no list of keys and values."""

STATE = (
    "its layers that are not plain attention keep one state for the whole text, which cannot go "
    "back to before a rejected draft token"
)
SIZES_DIFFER = (
    "its layers differ in their sizes, or share keys and values, and one cache serves all"
)
ALIBI = "it biases attention by the distance of tokens (alibi), which no attention here computes"
SELECTED_KEYS = "each layer chooses by an indexer which keys it attends to, and the cache has none"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "bailing_hybrid",
            "bamba",
            "falcon_h1",
            "falcon_mamba",
            "granitemoehybrid",
            "jamba",
            "kimi_linear",
            "lfm2",
            "lfm2_moe",
            "mamba",
            "mamba2",
            "minimax",
            "nemotron_h",
            "olmo_hybrid",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
            "recurrent_gemma",
            "rwkv",
            "xlstm",
            "zamba",
            "zamba2",
        ),
        STATE,
    ),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), SIZES_DIFFER),
    **dict.fromkeys(("bloom", "mpt"), ALIBI),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), SELECTED_KEYS),
}
"""Decoders that cannot be served, by model_type, and why."""
PADDED = ("gemma4_text",)
"""Decoders whose layers differ in their sizes, and are kept in one cache of the largest.

Layers that share keys and values keep them once each.
"""


def check_decoder(config: Any, library_class: str | None) -> None:
    """Raise UnsupportedModel unless a config is that of a decoder that runs here.

    `library_class` is what the library computes models of its type with, as language models.
    """
    kind = config.model_type
    if kind in REFUSED:
        raise UnsupportedModel(f"{kind} models cannot be served: {REFUSED[kind]}")
    _check_is_decoder(config, library_class)
    unsupported = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if unsupported or not isinstance(getattr(config, "num_attention_heads", None), int):
        named = ", ".join(sorted(unsupported)) or "no heads"
        raise UnsupportedModel(f"{kind} models cannot be served: {STATE} ({named})")
    differs = getattr(config, "num_kv_shared_layers", None) or is_heterogeneous(config)
    if differs and not (kind in PADDED and _can_pad(config)):
        raise UnsupportedModel(f"{kind} models cannot be served: {SIZES_DIFFER}")
    if getattr(config, "alibi", False):
        raise UnsupportedModel(f"this {kind} model cannot be served: {ALIBI}")
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        raise UnsupportedModel(f"{kind} states no context length (max_position_embeddings)")


def is_heterogeneous(config: Any) -> bool:
    """Return whether layers differ in their sizes."""
    return bool(getattr(config, "is_heterogeneous", False))


def _can_pad(config: Any) -> bool:
    """Return whether each layer's heads can be repeated to as many as the largest has."""
    if not is_heterogeneous(config):
        return True
    counts = [layer.num_key_value_heads for layer in config.per_layer_config]
    return all(max(counts) % count == 0 for count in counts)


def _check_is_decoder(config: Any, library_class: str | None) -> None:
    stated = set(getattr(config, "architectures", None) or [library_class])
    sees_ahead = config.is_encoder_decoder or getattr(
        config, "use_bidirectional_attention", None
    ) in (True, "all")
    if library_class in stated and not sees_ahead and config.get_text_config() is config:
        return
    others = ", nor an encoder-decoder of the kinds mt5, t5" if sees_ahead else ""
    raise UnsupportedModel(
        f"{config.model_type} ({', '.join(map(str, stated))}) is no decoder-only language "
        f"model{others}"
    )


def decoder_context(config: Any) -> int:
    """Return the longest context of a decoder.

    Some rotary frequencies switch for all texts of a pass once one is long, some layers attend
    within chunks of the text only, and some scale queries by their position from one on. Contexts
    end before that length, so that every layer attends to the whole text, and no text changes
    another's.
    """
    rotary = getattr(config, "rope_parameters", None) or {}
    bounds: list[int] = [config.max_position_embeddings]
    if rotary.get("rope_type") == "longrope":
        bounds.append(rotary["original_max_position_embeddings"])
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        bounds.append(config.attention_chunk_size)
    if getattr(config, "attn_temperature_tuning", False):
        bounds.append(int(config.floor_scale) - 1)
    return min(bounds)
