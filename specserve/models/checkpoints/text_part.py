"""The text model of a multimodal checkpoint: its names, without the names of what sees and hears.

Knows tensors by name only; no library and no weights.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

DECODERS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""Multimodal models by model_type, and the decoder that computes what their text model does.

With text alone, Qwen's rotation by time, height and width is that by the position: all three are
equal. A text model of a type that is itself a decoder (`ministral3` in `mistral3`) stays that.
"""
TRANSPOSED_EXPERTS = ("qwen3_vl_moe",)
"""Models whose files hold the matrices of experts transposed."""

RENAMES = (
    (re.compile(r"^(model\.language_model|language_model\.model)\."), "model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
)
"""Names of the text model in a file, by several versions of the library, and in the decoder."""
OTHERS = re.compile(
    r"^(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|embed_vision"
    r"|embed_audio)\."
)


def model_type(directory: Path) -> str | None:
    """Return what config.json says that a checkpoint is; None if it says nothing readable."""
    try:
        stated = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        kind = stated.get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return kind if isinstance(kind, str) else None


def is_multimodal(directory: Path) -> bool:
    """Return whether a checkpoint is one of which the text model alone is opened."""
    return model_type(directory) in DECODERS


def decoder_name(stored_name: str) -> str | None:
    """Return the decoder's name of a multimodal checkpoint's tensor; None if it is not of text."""
    if OTHERS.match(stored_name):
        return None
    for prefix, decoder_prefix in RENAMES:
        stored_name = prefix.sub(decoder_prefix, stored_name)
    return stored_name
