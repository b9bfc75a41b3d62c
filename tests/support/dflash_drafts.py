"""DFlash and DSpark drafts for tests: files as they are published, and what they compute.

Nothing here comes from the code under test. Names and keys come from z-lab's DFlash (its
dflash/model.py at 1012959), DeepSpec's DSpark (deepspec/modeling/dspark/qwen3 at 5905deb) and
speculators (its models/dflash and models/dspark, August 2026).
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

from tests.support import checkpoints


@dataclass(frozen=True, slots=True)
class DFlashSizes:
    """The sizes of a draft, and of the target that it reads."""

    hidden_size: int = 64
    target_hidden_size: int = 64
    intermediate_size: int = 96
    num_heads: int = 4
    kv_heads: int = 2
    num_layers: int = 2
    vocab_size: int = checkpoints.VOCAB
    draft_vocab_size: int | None = None  # None: it drafts all tokens, by the target's head
    taps: tuple[int, ...] = (1, 3)  # inputs of the target's layers
    block_size: int = 8
    mask_token: int = 35
    window: int | None = None  # of the first layer
    causal_first: bool = False  # no row of the first layer sees a later one of its block
    causal: bool = False  # nor of any layer
    markov_rank: int = 0
    from_newest: bool = False  # as DSpark draws
    logit_scale: float = 1.0  # of an own vocabulary head


def layer_keys(sizes: DFlashSizes) -> dict[str, Any]:
    kinds = ["full_attention"] * sizes.num_layers
    if sizes.window is not None:
        kinds[0] = "sliding_attention"
    return {
        "attention_bias": False,
        "head_dim": sizes.hidden_size // sizes.num_heads,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "layer_types": kinds,
        "max_position_embeddings": 128,
        "model_type": "qwen3",
        "num_attention_heads": sizes.num_heads,
        "num_hidden_layers": sizes.num_layers,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": sizes.window,
        "use_sliding_window": sizes.window is not None,
        "vocab_size": sizes.vocab_size,
    }


def write_z_lab(directory: Path, sizes: DFlashSizes, *, seed: int = 1, **keys: Any) -> Path:
    """Write a DFlash draft as z-lab publishes it; `keys` replace keys of config.json."""
    own: dict[str, Any] = {
        "mask_token_id": sizes.mask_token,
        "target_layer_ids": [tap - 1 for tap in sizes.taps],
    }
    if sizes.causal:
        own["causal"] = True
    config = layer_keys(sizes) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": sizes.block_size,
        "dflash_config": own,
        "num_target_layers": 4,
        "tie_word_embeddings": False,
    }
    return _write(directory, config | keys, _tensors(sizes, seed))


def write_deepspec(directory: Path, sizes: DFlashSizes, *, seed: int = 1, **keys: Any) -> Path:
    """Write a DSpark draft as DeepSpec saves it, with the confidence head that it has."""
    config = layer_keys(sizes) | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": sizes.block_size,
        "confidence_head_with_markov": False,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": sizes.markov_rank,
        "mask_token_id": sizes.mask_token,
        "num_anchors": 16,
        "num_target_layers": 4,
        "target_layer_ids": [tap - 1 for tap in sizes.taps],
        "tie_word_embeddings": False,
    }
    tensors = _tensors(sizes, seed)
    tensors["confidence_head.proj.weight"] = torch.zeros(1, sizes.hidden_size)
    tensors["confidence_head.proj.bias"] = torch.zeros(1)
    return _write(directory, config | keys, tensors)


def write_speculators(directory: Path, sizes: DFlashSizes, *, seed: int = 1, **keys: Any) -> Path:
    """Write a draft as speculators saves it: of DSpark where it has a Markov head."""
    kind = "dspark" if sizes.markov_rank else "dflash"
    config = {
        "architectures": ["DSparkDraftModel" if sizes.markov_rank else "DFlashDraftModel"],
        "aux_hidden_state_layer_ids": list(sizes.taps),
        "block_size": sizes.block_size,
        "draft_vocab_size": sizes.draft_vocab_size or sizes.vocab_size,
        "mask_token_id": sizes.mask_token,
        "sample_from_anchor": sizes.from_newest,
        "sliding_window_non_causal": sizes.window is not None and not sizes.causal_first,
        "speculators_config": {"algorithm": kind},
        "speculators_model_type": kind,
        "target_hidden_size": sizes.target_hidden_size,
        "transformer_layer_config": layer_keys(sizes),
    }
    if sizes.markov_rank:
        config |= {"markov_head_type": "vanilla", "markov_rank": sizes.markov_rank}
    return _write(directory, config | keys, _tensors(sizes, seed))


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _tensors(sizes: DFlashSizes, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, dim = sizes.hidden_size, sizes.hidden_size // sizes.num_heads

    def matrix(rows: int, columns: int) -> Tensor:
        drawn: Tensor = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return drawn

    def norm(width: int) -> Tensor:
        return 1 + 0.2 * torch.randn(width, generator=generator)

    tensors = {
        "fc.weight": matrix(hidden, len(sizes.taps) * sizes.target_hidden_size),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for index in range(sizes.num_layers):
        layer = f"layers.{index}"
        tensors |= {
            f"{layer}.input_layernorm.weight": norm(hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, sizes.intermediate_size),
            f"{layer}.mlp.gate_proj.weight": matrix(sizes.intermediate_size, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(sizes.intermediate_size, hidden),
            f"{layer}.post_attention_layernorm.weight": norm(hidden),
            f"{layer}.self_attn.k_norm.weight": norm(dim),
            f"{layer}.self_attn.k_proj.weight": matrix(sizes.kv_heads * dim, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{layer}.self_attn.q_norm.weight": norm(dim),
            f"{layer}.self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(sizes.kv_heads * dim, hidden),
        }
    known = sizes.draft_vocab_size
    if known is not None:
        ids = torch.randperm(sizes.vocab_size, generator=generator)[:known].sort().values
        tensors["d2t"] = ids - torch.arange(known)  # offsets, not ids
        tensors["lm_head.weight"] = sizes.logit_scale * matrix(known, hidden)
        tensors["embed_tokens.weight"] = matrix(sizes.vocab_size, hidden)
    if sizes.markov_rank:
        tensors["markov_head.markov_w1.weight"] = 2 * matrix(sizes.vocab_size, sizes.markov_rank)
        tensors["markov_head.markov_w2.weight"] = 2 * matrix(
            known or sizes.vocab_size, sizes.markov_rank
        )
    return tensors


class ReferenceDraft:
    """A draft by its formulas, recomputed whole for every block, in float64."""

    def __init__(self, directory: Path, sizes: DFlashSizes, library: Any) -> None:
        """Read a draft; `library` is the library's model of the target, in float64."""
        self.sizes = sizes
        stored = load_file(directory / "model.safetensors")
        self.weights = {
            name: tensor.double() for name, tensor in stored.items() if tensor.is_floating_point()
        }
        ends = {
            "embed_tokens.weight": library.get_input_embeddings().weight.detach(),
            "lm_head.weight": library.get_output_embeddings().weight.detach(),
        }
        self.weights = ends | self.weights
        ids = torch.arange(len(self.weights["lm_head.weight"]))
        self.target_ids = ids + stored["d2t"] if "d2t" in stored else ids
        config = LlamaConfig(
            hidden_size=sizes.hidden_size,
            num_attention_heads=sizes.num_heads,
            max_position_embeddings=128,
        )
        self.rotary = LlamaRotaryEmbedding(config)

    def draft(
        self, text: Sequence[int], taps: Tensor, chain: Sequence[int], *, first: int = 0
    ) -> Tensor:  # [1 + chain, vocab]
        """Return the logits after a text, and after each token of a chain that continues it.

        All come from one block. `taps` [positions, taps * hidden] are the target's states after
        the tokens from `first` on but the last; those before are not seen.
        """
        sizes, num_drafted = self.sizes, 1 + len(chain)
        masks = num_drafted - sizes.from_newest
        x = self.weights["embed_tokens.weight"][
            torch.tensor([text[-1], *[sizes.mask_token] * masks])
        ]
        context = self._norm("hidden_norm", self._linear("fc", taps.double()))
        for index in range(sizes.num_layers):
            layer = f"layers.{index}"
            normed = self._norm(f"{layer}.input_layernorm", x)
            x = x + self._linear(
                f"{layer}.self_attn.o_proj", self._attend(index, normed, context, first)
            )
            normed = self._norm(f"{layer}.post_attention_layernorm", x)
            gate, up = (self._linear(f"{layer}.mlp.{name}_proj", normed) for name in ("gate", "up"))
            x = x + self._linear(f"{layer}.mlp.down_proj", F.silu(gate) * up)
        logits = self._linear("lm_head", self._norm("norm", x))[-num_drafted:]
        if sizes.markov_rank:
            before = torch.tensor([text[-1], *chain])
            rows = self.weights["markov_head.markov_w1.weight"][before]
            logits = logits + self._linear("markov_head.markov_w2", rows)
        whole = logits.new_full((num_drafted, sizes.vocab_size), -torch.inf)
        return whole.index_copy(1, self.target_ids, logits)

    def _attend(self, index: int, rows: Tensor, context: Tensor, first: int) -> Tensor:
        sizes, layer = self.sizes, f"layers.{index}.self_attn"
        both = torch.cat([context, rows])
        q, k, v = (
            self._linear(f"{layer}.{name}_proj", x).view(len(x), heads, -1).transpose(0, 1)
            for name, heads, x in (
                ("q", sizes.num_heads, rows),
                ("k", sizes.kv_heads, both),
                ("v", sizes.kv_heads, both),
            )
        )
        q, k = self._norm(f"{layer}.q_norm", q), self._norm(f"{layer}.k_norm", k)
        at = torch.arange(first, first + len(both))
        cos, sin = self.rotary(both, at[None])
        own, _ = apply_rotary_pos_emb(q[None], q[None], cos[:, -len(rows) :], sin[:, -len(rows) :])
        _, keys = apply_rotary_pos_emb(k[None], k[None], cos, sin)
        seen = torch.ones(len(rows), len(both), dtype=torch.bool)
        if sizes.causal or (index == 0 and sizes.causal_first):
            seen &= at <= at[-len(rows) :, None]
        if index == 0 and sizes.window is not None:
            seen &= at > at[-len(rows) :, None] - sizes.window
        out = F.scaled_dot_product_attention(own, keys, v[None], attn_mask=seen, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], 1e-5)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T
