"""The files of EAGLE-3 heads, as SpecForge and `speculators` publish them.

Both hold the weights of a decoder layer over twice the hidden size, of the product that joins three
hidden states of the target, and of a vocabulary head that may know fewer tokens. They differ in
their config.json (head_config.py), in the names of the layer, and in how they count the target's
layers. Further layers are plain ones of Llama or Qwen 3. A P-EAGLE head (arXiv 2602.01469) also has
a mask token and `mask_hidden`, three states that its mask rows read in place of the target's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specserve.errors import ModelError
from specserve.features.eagle.head_config import EagleInfo, no_mask_token
from specserve.models.checkpoints.library import read_config
from specserve.models.checkpoints.tensors import StoredTensors
from specserve.models.checkpoints.weights import fingerprint, weight_files

NUM_TAPS = 3
"""Hidden states of the target that a head reads."""
LAYER_NAMES = ("midlayer.", "layers.0.")
"""Prefixes of the layer's weights, of SpecForge and of `speculators`."""
MASK_HIDDEN = "mask_hidden"
"""Three hidden states that a P-EAGLE head reads where the target's are not known yet."""


class HeadTensors:
    """The tensors of a head's files, by the names of `speculators`."""

    def __init__(self, directory: Path, what: str, vocab_size: int) -> None:
        """Open the files of a head, which messages call `what`; `vocab_size` is the target's."""
        self.directory, self._what, self._vocab_size = directory, what, vocab_size
        stored = StoredTensors(weight_files(directory))
        self._stored, self._names = stored, {_canonical(name): name for name in stored.names()}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._names:
            raise ModelError(f"the {self._what} at {self.directory} has no tensor {name}")
        return self._stored.shape(self._names[name])

    def read(self, name: str) -> Tensor:
        return self._stored.read(self._names[name])

    def target_ids(self) -> Tensor | None:  # [draft vocabulary]
        """Return the target's id of each token that the head knows; None: it knows all."""
        if "d2t" not in self._names:
            return None
        offsets = self.read("d2t").long()
        ids = offsets + torch.arange(len(offsets))
        if len(set(ids.tolist())) < len(ids) or ids.min() < 0 or ids.max() >= self._vocab_size:
            raise ModelError(
                f"d2t of the {self._what} at {self.directory} does not map its tokens to "
                f"{self._vocab_size} ids one to one"
            )
        return ids

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ModelError for tensors that are missing or of other sizes."""
        for name, shape in shapes.items():
            if self.shape(name) != shape:
                raise ModelError(
                    f"{name} of the {self._what} at {self.directory} is "
                    f"{_by(self.shape(name))}, and its config.json implies {_by(shape)}"
                )


class EagleWeights(HeadTensors):
    """The weights of an EAGLE-3 head."""

    def __init__(self, directory: Path, info: EagleInfo) -> None:
        super().__init__(directory, "EAGLE-3 head", info.vocab_size)
        self.info = info
        if MASK_HIDDEN in self and info.mask_token is None:
            raise no_mask_token(directory)
        self._check_shapes()

    @property
    def draft_vocab_size(self) -> int:
        return self.shape("lm_head.weight")[0]

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
            width = hidden * (1 if index else 2)
            expected |= layer_shapes(self.info.layer, f"layers.{index}", width)
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
        self.require(expected)


def layer_shapes(layer: Any, name: str, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer whose attention reads rows of `width` numbers."""
    hidden = layer.hidden_size
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
    taps, head = info.taps(config.num_hidden_layers), f"the EAGLE-3 head at {directory}"
    sizes = info.target_hidden_size, info.vocab_size
    require_sizes(target, config, head, sizes, taps, is_whole=len(taps) == NUM_TAPS)
    weights = EagleWeights(directory, info)
    if "embed_tokens.weight" not in weights and info.layer.hidden_size != config.hidden_size:
        raise ModelError(
            f"{head} has no embedding of its own, and the target's {config.hidden_size} numbers a "
            f"token do not fit its {info.layer.hidden_size}"
        )
    require_fingerprint(target, head, info.target, command="specserve eagle")
    return info


def require_sizes(
    target: Path,
    config: Any,
    head: str,
    sizes: tuple[int, int],
    taps: Sequence[int],
    *,
    is_whole: bool,
) -> None:
    """Raise ModelError unless a target's config has what a head reads.

    `sizes` are the numbers of a hidden state and the ids of the vocabulary, `taps` the layers whose
    inputs are read; `is_whole` says whether they are as many as such a head reads.
    """
    num_layers, its = config.num_hidden_layers, (config.hidden_size, config.vocab_size)
    names = "hidden states of", "a vocabulary of"
    for what, own, found in zip(names, sizes, its, strict=True):
        if own != found:
            raise ModelError(
                f"{head} is of another target than {target}: it expects {what} {own}, and the "
                f"target has {found}"
            )
    if not is_whole or not all(0 <= layer <= num_layers for layer in taps):
        raise ModelError(
            f"{head} is of another target than {target}: it reads the inputs of layers "
            f"{', '.join(map(str, taps))}, and the target has {num_layers} layers"
        )


def require_fingerprint(target: Path, head: str, own: str | None, *, command: str) -> None:
    """Raise ModelError for a head that `command` has trained for another target."""
    if own is not None and own != fingerprint(target):
        raise ModelError(
            f"{head} was trained for another target than {target}; `{command}` trains one for this "
            "one"
        )


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    return LAYER_NAMES[1] + name[len(LAYER_NAMES[0]) :] if name.startswith(LAYER_NAMES[0]) else name


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
