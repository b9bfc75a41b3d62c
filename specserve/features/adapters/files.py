"""The files of a low-rank adapter (LoRA), in the layout of PEFT: read, and compared with a target.

Knows names, shapes and scales; no torch, so that a process that only answers clients may check
an adapter.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from specserve.errors import AdapterError
from specserve.types import Adapter

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
KEY = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<factor>[AB])\.weight")
UNSUPPORTED: Mapping[str, str] = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "biases of the adapter (lora_bias)",
    "modules_to_save": "whole modules of its own (modules_to_save)",
    "layer_replication": "repeated layers (layer_replication)",
    "target_parameters": "changes of bare parameters (target_parameters)",
    "trainable_token_indices": "token embeddings of its own (trainable_token_indices)",
    "alora_invocation_tokens": "tokens that switch it on (alora_invocation_tokens)",
    "megatron_config": "Megatron's layers (megatron_config)",
}
"""Keys of the config that ask for what is not computed here, in words."""
INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model's weights as they are."""


@dataclass(frozen=True, slots=True)
class AdaptableLayer:
    """A linear layer of the target that adapters may change, in the whole model."""

    outputs: int
    inputs: int
    is_transposed: bool = False  # GPT-2 keeps its weights as [in, out]


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one layer, scale * B A: A is [rank, in], B is [out, rank]."""

    rank: int
    outputs: int
    inputs: int
    scale: float

    @property
    def num_numbers(self) -> int:
        return self.rank * (self.outputs + self.inputs)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The changes that an adapter's files describe, by the names of the target's layers."""

    directory: Path
    changes: Mapping[str, LowRank]
    base: str  # name of the base model as the trainer knew it, or ""

    @classmethod
    def open(cls, directory: Path) -> AdapterFiles:
        """Read the config and the header of the weights. Raises AdapterError."""
        config = _read_config(directory)
        shapes = _read_shapes(directory)
        factors: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, shape in shapes.items():
            match = KEY.fullmatch(key)
            if match is None:
                raise AdapterError(
                    f"{directory} has the tensor {key}, which is none of a plain LoRA "
                    "(base_model.model.<layer>.lora_A.weight and lora_B.weight)"
                )
            factors.setdefault(match["layer"], {})[match["factor"]] = shape
        if not factors:
            raise AdapterError(f"{directory} changes no layer: its {WEIGHTS_FILE} has no tensor")
        changes = {
            layer: _low_rank(directory, config, layer, parts) for layer, parts in factors.items()
        }
        return cls(directory, changes, str(config.get("base_model_name_or_path") or ""))

    @property
    def num_numbers(self) -> int:
        return sum(change.num_numbers for change in self.changes.values())

    def require_fits(self, layers: Mapping[str, AdaptableLayer]) -> None:
        """Raise AdapterError unless every change is one of these layers of the target."""
        for name, change in self.changes.items():
            layer = layers.get(name)
            if layer is None:
                raise AdapterError(
                    f"{self.directory} changes {name}, which is no layer of the target that "
                    "adapters may change (linear layers of its decoder layers, without experts)"
                )
            if (change.outputs, change.inputs) != (layer.outputs, layer.inputs):
                raise AdapterError(
                    f"{self.directory} is of another base model: it takes {name} as "
                    f"{change.outputs} x {change.inputs}, and the target's is "
                    f"{layer.outputs} x {layer.inputs}"
                )


def read_adapter(name: str, path: str) -> Adapter:
    """Return an adapter as requests name it, with a digest of its files. Raises AdapterError."""
    directory = Path(path).expanduser().absolute()
    AdapterFiles.open(directory)
    return Adapter(name, str(directory), digest(directory))


def digest(directory: Path) -> bytes:
    """Return a hash of the contents of an adapter's files. Raises AdapterError."""
    found = hashlib.blake2b(digest_size=16)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            with open(directory / name, "rb") as file:
                found.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise _unreadable(directory / name, error) from error
    return found.digest()


def _read_config(directory: Path) -> Mapping[str, Any]:
    """Return the config of an adapter that is a plain LoRA of a decoder."""
    path = directory / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
        raise AdapterError(f"{path} is not JSON") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path} must be an object of JSON")
    if (kind := config.get("peft_type")) != "LORA":
        raise AdapterError(f"{directory} is an adapter of the kind {kind}; only LORA is supported")
    if (task := config.get("task_type")) not in (None, "CAUSAL_LM"):
        raise AdapterError(f"{directory} is an adapter for {task}; only CAUSAL_LM is supported")
    if (bias := config.get("bias", "none")) != "none":
        raise AdapterError(f"{directory} trains biases (bias: {bias}), which is not supported")
    for key, words in UNSUPPORTED.items():
        if config.get(key):
            raise AdapterError(f"{directory} has {words}, which is not supported")
    if (start := config.get("init_lora_weights")) not in INITIALISATIONS:
        raise AdapterError(
            f"{directory} was initialised with {start}, which changes the base model's weights "
            "too; convert it to a plain LoRA when saving it with PEFT "
            "(path_initial_model_for_weight_conversion)"
        )
    return config


def _read_shapes(directory: Path) -> Mapping[str, tuple[int, ...]]:
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        raise AdapterError(f"{directory} has no {WEIGHTS_FILE}; save the adapter as safetensors")
    try:
        with safe_open(path, framework="np") as file:
            keys = file.keys()  # a file is no mapping
            return {key: tuple(file.get_slice(key).get_shape()) for key in keys}
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path} cannot be read as safetensors: {error}") from error


def _low_rank(
    directory: Path, config: Mapping[str, Any], layer: str, factors: Mapping[str, tuple[int, ...]]
) -> LowRank:
    """Return the change of a layer; a pattern of the config may give it its own rank and alpha."""
    a, b = factors.get("A", ()), factors.get("B", ())
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        raise AdapterError(
            f"{directory} has no matching pair lora_A [rank, in] and lora_B [out, rank] for {layer}"
        )
    rank = _setting(directory, config, "rank_pattern", "r", layer)
    alpha = _setting(directory, config, "alpha_pattern", "lora_alpha", layer)
    if rank != a[0]:
        raise AdapterError(
            f"{directory} states the rank {rank:g} for {layer}, and its weights have {a[0]}"
        )
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return LowRank(a[0], b[0], a[1], alpha / divisor)


def _setting(
    directory: Path, config: Mapping[str, Any], patterns: str, name: str, layer: str
) -> float:
    """Return a number of the config for a layer: that of the first pattern which names it."""
    own: Mapping[str, Any] = config.get(patterns) or {}
    value = next(
        (own[key] for key in own if re.match(rf"(.*\.)?({key})$", layer)), config.get(name)
    )
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise AdapterError(f"{directory} has {name} {value!r}, which must be a number above 0")
    return value


def _unreadable(path: Path, error: OSError) -> AdapterError:
    return AdapterError(f"{path} cannot be read: {error.strerror or type(error).__name__}")
