"""Checkpoints of the shapes of real models that compute what the demo's small models compute.

Their passes cost what passes of such models cost, their texts are real, and their draft tokens are
accepted as the demo pair's are. Layers and columns beyond the small model's have random
weights that nothing reads, or whose output is multiplied by 0.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LATER_COPIES = 0.97
"""Factor of the head's rows for the copies of a token, so that greedy texts hold the first."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama model."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 128_256


LLAMA_8B = Shape(hidden=4096, mlp=14336, layers=32, heads=32, kv_heads=8, head_dim=128)
LLAMA_1B = Shape(hidden=2048, mlp=8192, layers=16, heads=16, kv_heads=8, head_dim=128)


def write_shape(source: Path, shape: Shape, out: Path, device: torch.device) -> Path:
    """Write a checkpoint of that shape that computes the function of a small Llama model."""
    config = json.loads((source / "config.json").read_text())
    small: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        small |= load_file(file)
    small = {name: tensor.to(device).float() for name, tensor in small.items()}
    writer = _Writer(small, config, shape, device)
    out.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for number, tensors in enumerate(writer.parts()):
        name = f"model-{number:05d}.safetensors"
        save_file({key: one.cpu().contiguous() for key, one in tensors.items()}, out / name)
        files |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": files}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    sizes = {
        "hidden_size": shape.hidden,
        "head_dim": shape.head_dim,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.mlp,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": False,
        "rms_norm_eps": config["rms_norm_eps"] * config["hidden_size"] / shape.hidden,
        "max_position_embeddings": 8192,
    }
    (out / "config.json").write_text(json.dumps({**config, **sizes}, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, out / name)
    return out


@dataclass(frozen=True, slots=True)
class _Writer:
    small: Mapping[str, Tensor]
    config: Mapping[str, Any]
    shape: Shape
    device: torch.device

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of embedding and head, and then of each layer."""
        shape, embedding = self.shape, self.small["model.embed_tokens.weight"]
        ids = torch.arange(shape.vocab, device=self.device) % len(embedding)
        wide = self._zeros(shape.vocab, shape.hidden)
        wide[:, : self._width] = embedding[ids].bfloat16()
        head = wide.clone()
        head[len(embedding) :] *= LATER_COPIES
        yield {
            "model.embed_tokens.weight": wide,
            "lm_head.weight": head,
            "model.norm.weight": self._norm("model.norm.weight"),
        }
        generator = torch.Generator(device=self.device).manual_seed(1)
        for layer in range(shape.layers):
            tensors = self._random_layer(generator)
            if layer < self.config["num_hidden_layers"]:
                self._fill(tensors, f"model.layers.{layer}.")
            yield {f"model.layers.{layer}.{name}": one for name, one in tensors.items()}

    @property
    def _width(self) -> int:
        return int(self.config["hidden_size"])

    def _zeros(self, *sizes: int) -> Tensor:
        return torch.zeros(*sizes, device=self.device, dtype=torch.bfloat16)

    def _norm(self, name: str) -> Tensor:
        """Return the weight for rows whose further columns are 0, so that their mean is less."""
        weight = self._zeros(self.shape.hidden)
        weight[: self._width] = self.small[name] / math.sqrt(self.shape.hidden / self._width)
        return weight

    def _random_layer(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return a layer that adds nothing: what it puts out is multiplied by 0."""
        shape = self.shape
        query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = {
            "self_attn.q_proj.weight": (query, shape.hidden),
            "self_attn.k_proj.weight": (kv, shape.hidden),
            "self_attn.v_proj.weight": (kv, shape.hidden),
            "mlp.gate_proj.weight": (shape.mlp, shape.hidden),
            "mlp.up_proj.weight": (shape.mlp, shape.hidden),
        }
        tensors = {
            name: self._zeros(*size).normal_(0, 0.02, generator=generator)
            for name, size in sizes.items()
        }
        tensors["self_attn.o_proj.weight"] = self._zeros(shape.hidden, query)
        tensors["mlp.down_proj.weight"] = self._zeros(shape.hidden, shape.mlp)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            tensors[name] = torch.ones(shape.hidden, device=self.device, dtype=torch.bfloat16)
        return tensors

    def _fill(self, tensors: dict[str, Tensor], prefix: str) -> None:
        """Put the weights of a small layer into a random one, and zeros beside them."""

        def weight(name: str) -> Tensor:
            return self.small[f"{prefix}{name}.weight"]

        self._fill_attention(tensors, weight)
        width, mlp = self._width, int(self.config["intermediate_size"])
        for name in ("gate_proj", "up_proj"):
            own = tensors[f"mlp.{name}.weight"]
            own[:mlp] = 0
            own[:mlp, :width] = weight(f"mlp.{name}").bfloat16()
        tensors["mlp.down_proj.weight"][:width, :mlp] = weight("mlp.down_proj").bfloat16()
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.weight"] = self._norm(f"{prefix}{name}.weight")

    def _fill_attention(self, tensors: dict[str, Tensor], weight: Any) -> None:
        """Put small heads into the first columns of larger ones.

        Rotation pairs a head's column j with column j + dim / 2, at an angle that falls with j /
        dim: small columns go where the angles are theirs. Scores are divided by the root of the
        larger dimension, so queries are multiplied by as much.
        """
        shape, width = self.shape, self._width
        dim, kv_heads = int(self.config["head_dim"]), int(self.config["num_key_value_heads"])
        own_shared = int(self.config["num_attention_heads"]) // kv_heads
        shared, scale = shape.heads // shape.kv_heads, math.sqrt(shape.head_dim / dim)
        half = torch.arange(dim // 2, device=self.device) * shape.head_dim // dim
        columns = torch.cat([half, half + shape.head_dim // 2])
        q, k, v, out = (tensors[f"self_attn.{name}_proj.weight"] for name in "qkvo")
        for head in range(kv_heads):
            rows, own = head * shape.head_dim, slice(head * dim, (head + 1) * dim)
            k[rows : rows + shape.head_dim] = 0
            v[rows : rows + shape.head_dim] = 0
            k[rows + columns, :width] = weight("self_attn.k_proj")[own].bfloat16()
            v[rows : rows + dim, :width] = weight("self_attn.v_proj")[own].bfloat16()
            for i in range(own_shared):
                rows = (head * shared + i) * shape.head_dim
                first = (head * own_shared + i) * dim
                own_query = weight("self_attn.q_proj")[first : first + dim] * scale
                q[rows : rows + shape.head_dim] = 0
                q[rows + columns, :width] = own_query.bfloat16()
                out[:width, rows : rows + dim] = weight("self_attn.o_proj")[
                    :, first : first + dim
                ].bfloat16()
