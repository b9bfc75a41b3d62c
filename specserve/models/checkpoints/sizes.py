"""Bounds of the numbers that a config.json may state. Knows no library and no weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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
WINDOWS = ("sliding_window", "attention_chunk_size")
"""Numbers of positions."""
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
SCALES = (
    *("rope_theta", "factor", "attention_factor"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
)
"""Values of rotary embeddings, by which frequencies are divided or multiplied."""


def check_sizes(
    directory: Path, values: Mapping[str, Any], limits: Mapping[str, int] = SIZES
) -> None:
    """Raise UnsupportedModel for a size that no model has."""
    for name, most in limits.items():
        size = values.get(name)
        if size is not None and not (isinstance(size, int) and 1 <= size <= most):
            raise _refusal(directory, name, size, f"a whole number from 1 to {most}")


def check_numbers(directory: Path, config: Any) -> None:
    """Raise UnsupportedModel for numbers that no model has, and by which logits are none."""
    check_sizes(directory, {name: getattr(config, name, None) for name in SIZES})
    if getattr(config, "use_sliding_window", True):  # the library may state 0 for none
        windows = {name: getattr(config, name, None) for name in WINDOWS}
        check_sizes(directory, windows, dict.fromkeys(WINDOWS, 2**31 - 1))
    for name in EPSILONS:
        value = getattr(config, name, None)
        if value is not None and not (_is_finite(value) and value >= 0):
            raise _refusal(directory, name, value, "a number that is not negative")
    for rotary in _rotary_parameters(getattr(config, "rope_parameters", None)):
        for name in SCALES:
            value = rotary.get(name)
            if value is not None and not (_is_finite(value) and value > 0):
                raise _refusal(directory, name, value, "a number above 0")


def _rotary_parameters(value: object) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of rotary embeddings, which some models have for each kind of layer."""
    if isinstance(value, Mapping):
        yield value
        for of_kind in value.values():
            yield from _rotary_parameters(of_kind)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _refusal(directory: Path, name: str, value: object, wanted: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{directory} has {name} {str(value)[:40]!r} in config.json, and it must be {wanted}"
    )
