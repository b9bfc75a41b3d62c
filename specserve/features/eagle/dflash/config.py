"""The config.json of DFlash drafts (arXiv 2602.06036) and DSpark drafts (arXiv 2607.05147).

Three layouts are read: that of z-lab, whose keys of DFlash stand under `dflash_config`, that of
DeepSpec, where they stand beside the layers', and that of `speculators`. Reads no weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.errors import ModelError, ModelNotFound, UnsupportedModel
from specserve.features.eagle.head_config import FINGERPRINT, LAYER_KINDS, plain_layer_keys
from specserve.models.checkpoints.library import library_errors, llama_config

BLOCK_SIZE = 16
"""Rows of a block where config.json states none."""
NOT_COMPUTED = {
    "attention_sink_bias": "has attention sinks",
    "add_swa_attention_sink_bias": "has attention sinks",
    "conv_kernel_size": "is a DFlash 2 draft, which convolves over its block",
    "draft_adapter_rank": "has an adapter before its vocabulary head",
    "fc_layernorm": "has a norm before it joins the target's states",
    "final_logit_softcapping": "caps its logits",
    "quantization_config": "is quantized",
    "selector_rank": "is a DFlash 2 draft, which selects among candidates",
    "shift_label": "predicts the token after each row",
}
"""Keys of variants that are not computed here, unless their values are empty or false."""
NEUTRAL = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "is_neox_style": True}
"""Keys of variants that are not computed here, and the values at which they change nothing."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The part of a text and of a block that its rows see in one layer."""

    window: int | None  # positions, the last row's own included
    is_causal: bool  # no row sees a later one of its block


@dataclass(frozen=True, slots=True)
class DFlashInfo:
    """A draft's config.json: its layers, its block, and the target that it reads."""

    layer: Any  # the library's config of its layers
    sights: tuple[Sight, ...]  # of each layer
    target_hidden_size: int
    vocab_size: int  # the target's
    tapped_layers: tuple[int, ...]  # as in `HiddenTaps`
    block_size: int  # rows that it was trained with
    mask_token: int
    samples_from_newest: bool
    """The newest token's row draws the token after it, and a mask's the token after its own.

    So it is in DSpark; in DFlash a mask's row draws the token of its own position.
    """
    markov_rank: int  # of what is added to logits by the token before; 0: nothing
    target: str | None  # its fingerprint

    @property
    def num_layers(self) -> int:
        return len(self.sights)

    @property
    def max_drafted(self) -> int:
        return self.block_size - (not self.samples_from_newest)

    @classmethod
    def from_directory(cls, directory: Path) -> DFlashInfo:
        """Read config.json.

        Raises ModelNotFound without one, ModelError for one that cannot be read, and
        UnsupportedModel for a draft that is computed otherwise.
        """
        file = directory / "config.json"
        if not file.is_file():
            raise ModelNotFound(
                f"there is no DFlash draft at {directory}; `specserve dflash` trains one"
            )
        try:
            return cls._from_keys(directory, json.loads(file.read_text()))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"{file} is no config of a DFlash draft: {error}") from error

    @classmethod
    def _from_keys(cls, directory: Path, keys: Mapping[str, Any]) -> DFlashInfo:
        kind = keys.get("speculators_model_type")
        layer_keys = keys["transformer_layer_config"] if kind else keys
        own = {**layer_keys, **keys, **(keys.get("dflash_config") or {})}
        reason = next(_reasons(own, layer_keys), None)
        if reason is not None:
            raise UnsupportedModel(
                f"{directory} {reason}, and draft.kind dflash runs DFlash and DSpark drafts only",
                param="draft.path",
            )
        with library_errors(directory, "has a config.json that transformers cannot read"):
            layer = llama_config(plain_layer_keys(layer_keys))
        mask_token = int(own["mask_token_id"])
        if not 0 <= mask_token < layer.vocab_size:
            raise ModelError(
                f"the DFlash draft at {directory} has {mask_token} as mask_token_id, which is no "
                f"id of its vocabulary of {layer.vocab_size}"
            )
        return cls(
            layer,
            _sights(own),
            keys.get("target_hidden_size") or layer.hidden_size,
            layer.vocab_size,
            # `speculators` numbers the inputs of layers, as we do; the others number outputs.
            tuple(int(one) for one in keys["aux_hidden_state_layer_ids"])
            if kind
            else tuple(int(one) + 1 for one in own["target_layer_ids"]),
            int(own.get("block_size") or BLOCK_SIZE),
            mask_token,
            bool(own.get("sample_from_anchor", _is_dspark(keys))),
            int(own.get("markov_rank") or 0),
            keys.get(FINGERPRINT),
        )


def _reasons(own: Mapping[str, Any], layer_keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a draft is not computed here."""
    if own.get("speculators_model_type", "dflash") not in ("dflash", "dspark"):
        yield f"is a draft of the kind {own['speculators_model_type']}"
    elif "mask_token_id" not in own:
        yield "has no mask_token_id in its config.json"
    if own.get("projector_type", "dflash") != "dflash":
        yield f"has a head of the kind {own['projector_type']}"
    if own.get("markov_rank") and own.get("markov_head_type", "vanilla") != "vanilla":
        yield f"has a Markov head of the kind {own['markov_head_type']}"
    if layer_keys.get("model_type", "qwen3") not in LAYER_KINDS:
        yield f"has layers of {layer_keys['model_type']} instead of {' or '.join(LAYER_KINDS)}"
    if layer_keys.get("hidden_act", "silu") != "silu":
        yield f"has the activation {layer_keys['hidden_act']} instead of silu"
    yield from (reason for key, reason in NOT_COMPUTED.items() if own.get(key))
    yield from (
        f"has {key} {own[key]}"
        for key, neutral in NEUTRAL.items()
        if own.get(key, neutral) != neutral
    )


def _is_dspark(keys: Mapping[str, Any]) -> bool:
    names = (keys.get("speculators_model_type"), *(keys.get("architectures") or ()))
    return any(name is not None and "dspark" in name.lower() for name in names)


def _sights(own: Mapping[str, Any]) -> tuple[Sight, ...]:
    """Return what each layer sees: the whole text and block, unless the config says otherwise."""
    num_layers = int(own["num_hidden_layers"])
    kinds = own.get("layer_types") or ["full_attention"] * num_layers
    if own.get("use_swa") and "sliding_attention" not in kinds:
        kinds = ["sliding_attention"] * num_layers
        own = {"causal": False, **own}
    stated = next(
        (own[key] for key in ("is_causal", "causal") if own.get(key) is not None),
        None,
    )
    window = own.get("swa_window_size", own.get("sliding_window"))
    sights = []
    for kind in kinds:
        slides = kind == "sliding_attention"
        causal = slides and not own.get("sliding_window_non_causal") if stated is None else stated
        sights.append(Sight(int(window) if slides else None, bool(causal)))
    return tuple(sights)
