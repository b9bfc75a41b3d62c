"""The config.json of EAGLE-3 heads, as SpecForge and `speculators` write it. Reads no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.errors import ModelError, ModelNotFound, UnsupportedModel
from specserve.models.checkpoints.library import library_errors, llama_config

FINGERPRINT = "target_fingerprint"
"""Key of config.json under which `specserve eagle` names its target."""
LAYER_KINDS = ("llama", "qwen3")
EXTRA_NORMS = ("fc_norm", "norm_output")
"""Variants of the `speculators` format that are not computed here."""
HEAD_KINDS = ("eagle3", "peagle")
"""Kinds of drafts of `speculators` that are opened."""
PARALLEL_MODELS = ("peagle", "PEagleDraftModel", "PEagleSpeculator", "PeagleLlamaForCausalLM")
"""Names of P-EAGLE in a config: as a kind of `speculators`, and as architectures."""
PARALLEL_KEYS = ("parallel_drafting", "ptd_token_id", "pard_token")
"""Keys of a config with which vLLM drafts several tokens in one pass."""
MASK_TOKEN_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")
"""Keys of a P-EAGLE head's mask token: that of `speculators`, and those that vLLM reads."""


@dataclass(frozen=True, slots=True)
class EagleInfo:
    """A head's config.json: its layer, and the target that it reads."""

    layer: Any  # the library's config of the layer
    target_hidden_size: int
    vocab_size: int  # the target's
    tapped_layers: tuple[int, ...] | None  # as in `HiddenTaps`; None: the usual ones
    norm_before_residual: bool
    norm_before_fc: bool
    target: str | None  # its fingerprint
    num_layers: int = 1
    mask_token: int | None = None  # of a P-EAGLE head; None: it drafts one token a pass

    @classmethod
    def from_directory(cls, directory: Path) -> EagleInfo:
        """Read config.json.

        Raises ModelNotFound without one, ModelError for one that cannot be read, and
        UnsupportedModel for a head that is computed otherwise.
        """
        file = directory / "config.json"
        if not file.is_file():
            raise ModelNotFound(
                f"there is no EAGLE-3 head at {directory}; `specserve eagle` trains one"
            )
        try:
            keys = json.loads(file.read_text())
            speculators = "transformer_layer_config" in keys
            layer_keys = keys["transformer_layer_config"] if speculators else keys
            _require_supported(directory, keys, layer_keys)
            with library_errors(directory, "has a config.json that transformers cannot read"):
                layer = llama_config(plain_layer_keys(layer_keys))
            return cls(
                layer,
                keys.get("target_hidden_size") or layer.hidden_size,
                layer.vocab_size,
                _tapped_layers(keys, speculators=speculators),
                # `speculators` states it always; vLLM takes one that does not for True.
                bool(keys.get("norm_before_residual", speculators)),
                bool(keys.get("norm_before_fc", False)),
                keys.get(FINGERPRINT),
                # The library's config has another default for one that states none.
                int(layer_keys.get("num_hidden_layers", 1)),
                _mask_token(directory, keys, layer.vocab_size),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"{file} is no config of an EAGLE-3 head: {error}") from error

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Return the tapped layers of a target with that many layers.

        A config that names none means the layers of the paper's code: early, middle and late.
        """
        return self.tapped_layers or (2, num_layers // 2, num_layers - 3)


def _require_supported(
    directory: Path, keys: Mapping[str, Any], layer_keys: Mapping[str, Any]
) -> None:
    reasons = (
        (
            keys.get("speculators_model_type", "eagle3") not in HEAD_KINDS,
            f"is a draft of the kind {keys.get('speculators_model_type')}",
        ),
        (
            layer_keys.get("num_hidden_layers", 1) < 1,
            "has no layer",
        ),
        (
            layer_keys.get("model_type", "llama") not in LAYER_KINDS,
            f"has a layer of {layer_keys.get('model_type')} instead of {' or '.join(LAYER_KINDS)}",
        ),
        (
            layer_keys.get("hidden_act", "silu") != "silu",
            f"has the activation {layer_keys.get('hidden_act')} instead of silu",
        ),
        (
            any(keys.get(norm) for norm in EXTRA_NORMS),
            f"has norms of a later variant ({', '.join(EXTRA_NORMS)})",
        ),
        (
            not (keys.get("eagle_config") or {}).get("use_aux_hidden_state", True),
            "reads one hidden state instead of three, as EAGLE 1 and 2 do",
        ),
    )
    for applies, reason in reasons:
        if applies:
            raise UnsupportedModel(
                f"{directory} {reason}, and draft.kind eagle runs EAGLE-3 heads only",
                param="draft.path",
            )


def _is_parallel(keys: Mapping[str, Any]) -> bool:
    """Return whether a config is that of a P-EAGLE head."""
    names = {keys.get("speculators_model_type"), *(keys.get("architectures") or ())}
    stated = (keys.get(name) for name in PARALLEL_KEYS)
    return not names.isdisjoint(PARALLEL_MODELS) or any(
        value is not None and value is not False for value in stated
    )


def _mask_token(directory: Path, keys: Mapping[str, Any], vocab_size: int) -> int | None:
    """Return the mask token of a P-EAGLE head's config, or None for another head's."""
    if not _is_parallel(keys):
        return None
    name = next((name for name in MASK_TOKEN_KEYS if keys.get(name) is not None), None)
    if name is None:
        raise no_mask_token(directory)
    token = int(keys[name])
    if not 0 <= token < vocab_size:
        raise ModelError(
            f"the P-EAGLE head at {directory} has {token} as {name} in config.json, which is no "
            f"id of its vocabulary of {vocab_size}"
        )
    return token


def no_mask_token(directory: Path) -> ModelError:
    """Return the error for a P-EAGLE head whose config.json names no mask token."""
    return ModelError(
        f"{directory} is a P-EAGLE head without a mask token; add the id that it was trained with "
        f"to its config.json, as {' or '.join(MASK_TOKEN_KEYS)}"
    )


def plain_layer_keys(layer_keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the library's config of a Llama layer takes of these keys.

    `speculators` leaves out what equals the library's default; a layer of Qwen 3 is one of Llama
    with two norms more.
    """
    left_out = ("architectures", "model_type", "transformers_version", "auto_map", "dtype")
    return {
        name: value
        for name, value in layer_keys.items()
        if name not in left_out and name != "torch_dtype"
    }


def _tapped_layers(keys: Mapping[str, Any], *, speculators: bool) -> tuple[int, ...] | None:
    """Return the layers whose inputs are read.

    `speculators` and vLLM number inputs, as we do; SpecForge and SGLang number outputs.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    if keys.get(name):
        return tuple(int(layer) for layer in keys[name])
    outputs = None if speculators else (keys.get("eagle_config") or {}).get(name)
    return tuple(int(layer) + 1 for layer in outputs) if outputs else None
