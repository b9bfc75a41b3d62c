"""EAGLE-3 heads for tests: files as they are published, and what a head computes, by torch alone.

Nothing here comes from the code under test. The names and keys of the files come from SpecForge
(LlamaForCausalLMEagle3) and from speculators 0.3 (Eagle3Speculator). Names of P-EAGLE heads come
from speculators (its models/peagle at c05b95b, August 2026) and from what vLLM reads besides (its
models/llama_eagle3.py): `ptd_token_id`, and `mask_hidden` of two dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

MASK_HIDDEN = "mask_hidden"


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The sizes of a head, and of the target that it reads."""

    hidden_size: int = 64
    target_hidden_size: int = 64
    intermediate_size: int = 96
    num_heads: int = 4
    kv_heads: int = 2
    vocab_size: int = 300
    draft_vocab_size: int = 120
    # Inputs of the target's layers; None: config.json does not say.
    taps: tuple[int, ...] | None = (1, 2, 3)
    norm_before_residual: bool = False
    has_embedding: bool = True
    logit_scale: float = 3.0  # of the random vocabulary head
    num_layers: int = 1
    mask_token: int | None = None  # of a P-EAGLE head


def write_specforge(directory: Path, sizes: HeadSizes, *, seed: int = 1, **keys: Any) -> Path:
    """Write a head as SpecForge saves it; `keys` replace keys of config.json."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "draft_vocab_size": sizes.draft_vocab_size,
        "eos_token_id": 1,
        "head_dim": sizes.hidden_size // sizes.num_heads,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": sizes.intermediate_size,
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": sizes.num_heads,
        "num_hidden_layers": sizes.num_layers,
        "num_key_value_heads": sizes.kv_heads,
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "target_hidden_size": sizes.target_hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.53.0",
        "use_cache": True,
        "vocab_size": sizes.vocab_size,
    }
    if sizes.mask_token is not None:
        config["ptd_token_id"] = sizes.mask_token
    if sizes.taps is not None:  # which are counted by the layers' outputs
        outputs = [layer - 1 for layer in sizes.taps]
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": outputs,
            "use_aux_hidden_state": True,
        }
    tensors = _tensors(sizes, "midlayer" if sizes.mask_token is None else "layers.0", seed)
    return _write(directory, config | keys, tensors)


def write_speculators(directory: Path, sizes: HeadSizes, *, seed: int = 1, **keys: Any) -> Path:
    """Write a head as speculators saves it; `keys` replace keys of config.json."""
    layer = {
        "attention_bias": False,
        "head_dim": sizes.hidden_size // sizes.num_heads,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "max_position_embeddings": 128,
        "model_type": "llama",
        "num_attention_heads": sizes.num_heads,
        "num_hidden_layers": sizes.num_layers,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "vocab_size": sizes.vocab_size,
    }
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": sizes.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": None if sizes.taps is None else list(sizes.taps),
        "has_no_defaults_at_init": False,
        "norm_before_residual": sizes.norm_before_residual,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": 5,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "owner/target"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "target_hidden_size": sizes.target_hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformer_layer_config": layer,
        "transformers_version": "4.57.1",
    }
    tensors = _tensors(sizes, "layers.0", seed)
    if sizes.mask_token is not None:
        config |= {
            "architectures": ["PEagleSpeculator"],
            "embed_requires_grad": True,
            "fc_norm": False,
            "mask_token_id": sizes.mask_token,
            "norm_before_fc": False,
            "norm_output": False,
            "speculators_config": config["speculators_config"] | {"algorithm": "peagle"},
            "speculators_model_type": "peagle",
        }
        tensors[MASK_HIDDEN] = tensors[MASK_HIDDEN][None]  # of three dimensions
    return _write(directory, config | keys, tensors)


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _tensors(sizes: HeadSizes, layer: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, dim = sizes.hidden_size, sizes.hidden_size // sizes.num_heads

    def matrix(rows: int, columns: int) -> Tensor:
        drawn: Tensor = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return drawn

    def norm(width: int) -> Tensor:
        return 1 + 0.2 * torch.randn(width, generator=generator)

    tensors = {
        "fc.weight": matrix(hidden, 3 * sizes.target_hidden_size),
        f"{layer}.hidden_norm.weight": norm(hidden),
        f"{layer}.input_layernorm.weight": norm(hidden),
        f"{layer}.mlp.down_proj.weight": matrix(hidden, sizes.intermediate_size),
        f"{layer}.mlp.gate_proj.weight": matrix(sizes.intermediate_size, hidden),
        f"{layer}.mlp.up_proj.weight": matrix(sizes.intermediate_size, hidden),
        f"{layer}.post_attention_layernorm.weight": norm(hidden),
        f"{layer}.self_attn.k_proj.weight": matrix(sizes.kv_heads * dim, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": matrix(hidden, hidden),
        f"{layer}.self_attn.q_proj.weight": matrix(hidden, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": matrix(sizes.kv_heads * dim, 2 * hidden),
        "lm_head.weight": sizes.logit_scale * matrix(sizes.draft_vocab_size, hidden),
        "norm.weight": norm(hidden),
    }
    if sizes.has_embedding:
        tensors["embed_tokens.weight"] = matrix(sizes.vocab_size, hidden)
    if sizes.draft_vocab_size != sizes.vocab_size:
        known = torch.randperm(sizes.vocab_size, generator=generator)[: sizes.draft_vocab_size]
        known = known.sort().values
        tensors["d2t"] = known - torch.arange(sizes.draft_vocab_size)  # offsets, not ids
        tensors["t2d"] = torch.zeros(sizes.vocab_size, dtype=torch.bool).index_fill_(0, known, True)
    for index in range(1, sizes.num_layers):  # plain layers
        deeper = f"layers.{index}"
        tensors |= {
            f"{deeper}.input_layernorm.weight": norm(hidden),
            f"{deeper}.mlp.down_proj.weight": matrix(hidden, sizes.intermediate_size),
            f"{deeper}.mlp.gate_proj.weight": matrix(sizes.intermediate_size, hidden),
            f"{deeper}.mlp.up_proj.weight": matrix(sizes.intermediate_size, hidden),
            f"{deeper}.post_attention_layernorm.weight": norm(hidden),
            f"{deeper}.self_attn.k_proj.weight": matrix(sizes.kv_heads * dim, hidden),
            f"{deeper}.self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{deeper}.self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{deeper}.self_attn.v_proj.weight": matrix(sizes.kv_heads * dim, hidden),
        }
    if sizes.mask_token is not None:
        tensors[MASK_HIDDEN] = torch.randn(1, 3 * sizes.target_hidden_size, generator=generator)
    return tensors


class ReferenceHead:
    """A head by its formulas, recomputed whole for every row, in the number format given."""

    def __init__(
        self,
        directory: Path,
        sizes: HeadSizes,
        embedding: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.sizes, self.dtype = sizes, dtype
        stored = load_file(directory / "model.safetensors")
        self.weights = {
            name.replace("midlayer.", "layers.0."): tensor.to(dtype)
            for name, tensor in stored.items()
            if tensor.is_floating_point()
        }
        self.embedding = self.weights.get(
            "embed_tokens.weight", None if embedding is None else embedding.to(dtype)
        )
        ids = torch.arange(sizes.draft_vocab_size)
        self.target_ids = ids + stored["d2t"] if "d2t" in stored else ids
        config = LlamaConfig(
            hidden_size=sizes.hidden_size,
            num_attention_heads=sizes.num_heads,
            max_position_embeddings=128,
        )
        self.rotary = LlamaRotaryEmbedding(config)

    def draft(
        self, tokens: Sequence[int], taps: Tensor, chain: Sequence[int]
    ) -> Tensor:  # [1 + chain, vocab]
        """Return the logits after a text, and after each token of a chain that continues it.

        `taps` [positions, 3 * hidden] are the target's states after all tokens but the last.
        """
        texts = torch.tensor([*tokens, *chain])[None]
        return self.draft_many(texts, taps[None], num_drafted=len(chain))[0]

    def draft_many(
        self, texts: Tensor, taps: Tensor, *, num_drafted: int = 0
    ) -> Tensor:  # [texts, 1 + num_drafted, vocab]
        """Return what `draft` does for several texts, whose last tokens are their chains."""
        states = self._linear("fc", taps.to(self.dtype))
        logits = []
        for _ in range(num_drafted + 1):
            newest = self._layer(states, texts[:, 1 : states.shape[1] + 1])[:, -1:]
            logits.append(self._to_target(self._linear("lm_head", self._norm("norm", newest))))
            states = torch.cat([states, newest], dim=1)
        return torch.cat(logits, dim=1)

    def draft_block(
        self, tokens: Sequence[int], taps: Tensor, *, num_drafted: int
    ) -> Tensor:  # [num_drafted, vocab]
        """Return the logits of a P-EAGLE head after a text, all of one pass.

        Masks follow the newest token, each with the mask's token and the mask's three states.
        """
        assert self.sizes.mask_token is not None
        masks = num_drafted - 1
        ids = torch.tensor([*tokens[1:], *[self.sizes.mask_token] * masks])[None]
        hidden = self.weights[MASK_HIDDEN].reshape(1, -1).expand(masks, -1)
        states = self._linear("fc", torch.cat([taps.to(self.dtype), hidden]))[None]
        last = self._layer(states, ids)[:, -num_drafted:]
        return self._to_target(self._linear("lm_head", self._norm("norm", last)))[0]

    def _layer(self, states: Tensor, ids: Tensor) -> Tensor:  # [texts, rows, hidden], [texts, rows]
        assert self.embedding is not None
        normed = self._norm("layers.0.hidden_norm", states)
        residual = normed if self.sizes.norm_before_residual else states
        both = torch.cat(
            [self._norm("layers.0.input_layernorm", self.embedding[ids]), normed], dim=-1
        )
        x = self._rest_of_layer("layers.0", both, residual)
        for index in range(1, self.sizes.num_layers):
            layer = f"layers.{index}"
            x = self._rest_of_layer(layer, self._norm(f"{layer}.input_layernorm", x), x)
        return x

    def _rest_of_layer(self, layer: str, normed: Tensor, residual: Tensor) -> Tensor:
        x = residual + self._linear(f"{layer}.self_attn.o_proj", self._attend(layer, normed))
        normed = self._norm(f"{layer}.post_attention_layernorm", x)
        gate, up = (self._linear(f"{layer}.mlp.{name}_proj", normed) for name in ("gate", "up"))
        return x + self._linear(f"{layer}.mlp.down_proj", F.silu(gate) * up)

    def _attend(self, layer: str, x: Tensor) -> Tensor:
        q, k, v = (
            self._linear(f"{layer}.self_attn.{name}_proj", x)
            .view(*x.shape[:2], heads, -1)
            .transpose(1, 2)
            for name, heads in (
                ("q", self.sizes.num_heads),
                ("k", self.sizes.kv_heads),
                ("v", self.sizes.kv_heads),
            )
        )
        cos, sin = self.rotary(x, torch.arange(x.shape[1])[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    def _to_target(self, logits: Tensor) -> Tensor:
        whole = logits.new_full((*logits.shape[:2], self.sizes.vocab_size), -torch.inf)
        return whole.index_copy(2, self.target_ids, logits)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], 1e-5)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T
