"""Bounds of the sizes that a config.json may state. Knows no library and no weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specserve.errors import UnsupportedModel

MAX_LAYERS = 1_000
MAX_WIDTH = 2**20
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers"), MAX_LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads"), 2**16),
    **dict.fromkeys(("num_local_experts", "num_experts", "num_experts_per_tok"), 2**16),
    **dict.fromkeys(("hidden_size", "d_model", "head_dim", "d_kv"), MAX_WIDTH),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "d_ff"), MAX_WIDTH),
    "vocab_size": 2**24,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 2**31 - 1),
}
"""Values of a config beyond which it is taken for damaged: building the module would not end."""


def check_sizes(directory: Path, config: Any) -> None:
    """Raise UnsupportedModel for sizes that no model has."""
    for name, most in SIZES.items():
        size = getattr(config, name, None)
        if size is None or (isinstance(size, int) and 1 <= size <= most):
            continue
        raise UnsupportedModel(
            f"{directory} has {name} {str(size)[:40]!r} in config.json, and it must be "
            f"a whole number from 1 to {most}"
        )
