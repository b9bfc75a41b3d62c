"""The files of EAGLE-3 heads, as SpecForge and `speculators` publish them.

Both hold the weights of a decoder layer over twice the hidden size, of the product that joins three
hidden states of the target, and of a vocabulary head that may know fewer tokens. They differ in
their config.json, in the names of the layer, and in how they count the target's layers. Further
layers are plain ones of Llama or Qwen 3. A P-EAGLE head (arXiv 2602.01469) also has a mask token
and `mask_hidden`, three states that its mask rows read in place of the target's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specserve.errors import ModelError, ModelNotFound, UnsupportedModel
from specserve.models.checkpoints.library import library_errors, llama_config, read_config
from specserve.models.checkpoints.tensors import StoredTensors
from specserve.models.checkpoints.weights import fingerprint, weight_files

NUM_TAPS = 3
"""Hidden states of the target that a head reads."""
LAYER_NAMES = ("midlayer.", "layers.0.")
"""Prefixes of the layer's weights, of SpecForge and of `speculators`."""
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
MASK_HIDDEN = "mask_hidden"
"""Three hidden states that a P-EAGLE head reads where the target's are not known yet."""


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
                layer = llama_config(_plain(layer_keys))
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


class EagleWeights:
    """The weights of a head's files, by the names of `speculators`."""

    def __init__(self, directory: Path, info: EagleInfo) -> None:
        self.directory, self.info = directory, info
        stored = StoredTensors(weight_files(directory))
        self._stored, self._names = stored, {_canonical(name): name for name in stored.names()}
        if MASK_HIDDEN in self and info.mask_token is None:
            raise _no_mask_token(directory)
        self._check_shapes()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def draft_vocab_size(self) -> int:
        return self.shape("lm_head.weight")[0]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._names:
            raise ModelError(f"the EAGLE-3 head at {self.directory} has no tensor {name}")
        return self._stored.shape(self._names[name])

    def read(self, name: str) -> Tensor:
        return self._stored.read(self._names[name])

    def target_ids(self) -> Tensor | None:  # [draft vocabulary]
        """Return the target's id of each token that the head knows; None: it knows all."""
        if "d2t" not in self._names:
            return None
        offsets = self.read("d2t").long()
        ids = offsets + torch.arange(len(offsets))
        if len(set(ids.tolist())) < len(ids) or ids.min() < 0 or ids.max() >= self.info.vocab_size:
            raise ModelError(
                f"d2t of the EAGLE-3 head at {self.directory} does not map its tokens to "
                f"{self.info.vocab_size} ids one to one"
            )
        return ids

    def _check_shapes(self) -> None:
        """Raise ModelError for tensors of other sizes than config.json states."""
        hidden = self.info.layer.hidden_size
        expected = {
            "fc.weight": (hidden, NUM_TAPS * self.info.target_hidden_size),
            "layers.0.hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
        }
        for index in range(self.info.num_layers):
            expected |= self._layer_shapes(f"layers.{index}", hidden * (1 if index else 2))
        if self.info.norm_before_fc:
            expected["input_norm.weight"] = (NUM_TAPS * self.info.target_hidden_size,)
        if "d2t" in self or self.draft_vocab_size != self.info.vocab_size:
            expected["d2t"] = (self.draft_vocab_size,)
        if "embed_tokens.weight" in self:
            expected["embed_tokens.weight"] = (self.info.vocab_size, hidden)
        if self.info.mask_token is not None:  # `speculators` saves it with a dimension more
            width = NUM_TAPS * self.info.target_hidden_size
            found = self.shape(MASK_HIDDEN)
            expected[MASK_HIDDEN] = found if math.prod(found) == width else (1, width)
        for name, shape in expected.items():
            if self.shape(name) != shape:
                raise ModelError(
                    f"{name} of the EAGLE-3 head at {self.directory} is "
                    f"{_by(self.shape(name))}, and its config.json implies {_by(shape)}"
                )

    def _layer_shapes(self, name: str, width: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer whose attention reads rows of `width` numbers."""
        layer, hidden = self.info.layer, self.info.layer.hidden_size
        head_dim = layer.head_dim or hidden // layer.num_attention_heads
        queries, keys = layer.num_attention_heads * head_dim, layer.num_key_value_heads * head_dim
        return {
            f"{name}.self_attn.q_proj.weight": (queries, width),
            f"{name}.self_attn.k_proj.weight": (keys, width),
            f"{name}.self_attn.v_proj.weight": (keys, width),
            f"{name}.self_attn.o_proj.weight": (hidden, queries),
            f"{name}.mlp.gate_proj.weight": (layer.intermediate_size, hidden),
            f"{name}.mlp.up_proj.weight": (layer.intermediate_size, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, layer.intermediate_size),
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
        }


def require_eagle_for(target: Path, directory: Path) -> EagleInfo:
    """Return a head's config; raise ModelError unless the head reads this target.

    Reads headers, and of the target's weights no more than its norms.
    """
    info, config = EagleInfo.from_directory(directory), read_config(target)
    num_layers = config.num_hidden_layers
    for what, own, its in (
        ("hidden states of", info.target_hidden_size, config.hidden_size),
        ("a vocabulary of", info.vocab_size, config.vocab_size),
    ):
        if own != its:
            raise ModelError(
                f"the EAGLE-3 head at {directory} is of another target than {target}: it expects "
                f"{what} {own}, and the target has {its}"
            )
    taps = info.taps(num_layers)
    if len(taps) != NUM_TAPS or not all(0 <= layer <= num_layers for layer in taps):
        raise ModelError(
            f"the EAGLE-3 head at {directory} is of another target than {target}: it reads the "
            f"inputs of layers {', '.join(map(str, taps))}, and the target has {num_layers} layers"
        )
    weights = EagleWeights(directory, info)
    if "embed_tokens.weight" not in weights and info.layer.hidden_size != config.hidden_size:
        raise ModelError(
            f"the EAGLE-3 head at {directory} has no embedding of its own, and the target's "
            f"{config.hidden_size} numbers a token do not fit its {info.layer.hidden_size}"
        )
    if info.target is not None and info.target != fingerprint(target):
        raise ModelError(
            f"the EAGLE-3 head at {directory} was trained for another target than {target}; "
            "`specserve eagle` trains one for this one"
        )
    return info


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
        raise _no_mask_token(directory)
    token = int(keys[name])
    if not 0 <= token < vocab_size:
        raise ModelError(
            f"the P-EAGLE head at {directory} has {token} as {name} in config.json, which is no "
            f"id of its vocabulary of {vocab_size}"
        )
    return token


def _no_mask_token(directory: Path) -> ModelError:
    return ModelError(
        f"{directory} is a P-EAGLE head without a mask token; add the id that it was trained with "
        f"to its config.json, as {' or '.join(MASK_TOKEN_KEYS)}"
    )


def _plain(layer_keys: Mapping[str, Any]) -> dict[str, Any]:
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


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    return LAYER_NAMES[1] + name[len(LAYER_NAMES[0]) :] if name.startswith(LAYER_NAMES[0]) else name


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
