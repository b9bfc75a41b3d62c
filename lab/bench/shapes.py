"""Checkpoints for measurements: a Llama of true proportions with random weights, and its draft.

A widened demo pair has one huge MLP a layer; these have the proportions of published models.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import torch
from safetensors.torch import save_file
from torch import Tensor

from specserve.config.tree import DEMO

VOCAB_SIZE = 32_000
STD = 0.02


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a Llama whose head is its embedding."""

    num_layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    vocab_size: int = VOCAB_SIZE

    def config(self) -> dict[str, object]:
        """Return a config.json: the demo target's with these sizes."""
        config: dict[str, object] = json.loads((DEMO / "target" / "config.json").read_text())
        sizes = {
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "vocab_size": self.vocab_size,
        }
        return {**config, **sizes, "tie_word_embeddings": True}

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by name; norms have one dimension."""
        hidden, keys = self.hidden, self.hidden // self.heads * self.kv_heads
        layer = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (self.mlp, hidden),
            "mlp.up_proj": (self.mlp, hidden),
            "mlp.down_proj": (hidden, self.mlp),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes: dict[str, tuple[int, ...]] = {
            f"model.layers.{number}.{name}.weight": shape
            for number in range(self.num_layers)
            for name, shape in layer.items()
        }
        shapes["model.embed_tokens.weight"] = (self.vocab_size, hidden)
        shapes["model.norm.weight"] = (hidden,)
        return shapes


PROPORTIONAL = LlamaShape(16, 1024, 2816, 16, 8)
PROPORTIONAL_DRAFT = LlamaShape(2, 512, 1408, 8, 4)


def write_random(shape: LlamaShape, out_dir: Path) -> int:
    """Write a checkpoint with random weights and return the number of its parameters.

    The tokenizer is the demo's, filled up with tokens that no text contains.
    """
    out_dir.mkdir(parents=True)
    weights = {name: _random(name, sizes) for name, sizes in shape.tensor_shapes().items()}
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    (out_dir / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
    for name in ("generation_config.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / "target" / name, out_dir / name)
    _write_tokenizer(shape.vocab_size, out_dir)
    return sum(weight.numel() for weight in weights.values())


def _random(name: str, sizes: tuple[int, ...]) -> Tensor:
    if len(sizes) == 1:
        return torch.ones(sizes, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(crc32(name.encode()))  # every copy is the same
    return torch.empty(sizes).normal_(0.0, STD, generator=generator).to(torch.bfloat16)


def _write_tokenizer(vocab_size: int, out_dir: Path) -> None:
    file = "tokenizer.json"
    tokenizer = json.loads((DEMO / "target" / file).read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    taken = {*vocab.values(), *(added["id"] for added in tokenizer["added_tokens"])}
    vocab.update({f"<unused{i}>": i for i in range(vocab_size) if i not in taken})
    (out_dir / file).write_text(json.dumps(tokenizer), encoding="utf-8")
