"""A DFlash or DSpark draft for training: many blocks of a window at once.

Knows no KV cache and no target.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.features.eagle.trainable_head import Norm, rotate
from specserve.models.checkpoints.library import llama_rotary


class DFlashModule(nn.Module):
    """A draft with the names of its files; embedding and vocabulary head are the target's."""

    def __init__(
        self,
        config: Any,
        *,
        num_layers: int,
        num_taps: int,
        target_hidden: int,
        vocab_size: int,
        markov_rank: int,
    ) -> None:
        super().__init__()
        self.config, self.num_layers = config, num_layers
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(num_taps * target_hidden, hidden, bias=False)
        self.hidden_norm, self.norm = Norm(hidden, eps), Norm(hidden, eps)
        self.layers = nn.ModuleList(_layer(config) for _ in range(num_layers))
        self.rotary = llama_rotary(config)
        self.markov_head = (
            nn.ModuleDict(
                {
                    "markov_w1": nn.Embedding(vocab_size, markov_rank),
                    "markov_w2": nn.Linear(markov_rank, vocab_size, bias=False),
                }
            )
            if markov_rank
            else None
        )

    def forward(self, taps: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """Return the normed rows of blocks, [blocks, rows, hidden].

        `taps` [positions, taps * target hidden] are the target's states, `blocks` [blocks, rows,
        hidden] the embeddings, and `anchors` [blocks] the positions of their first rows.
        """
        num, rows, hidden = blocks.shape
        context, x = self.hidden_norm(self.fc(taps)), blocks.reshape(num * rows, hidden)
        device = x.device
        own = (anchors[:, None] + torch.arange(rows, device=device)).flatten()
        positions = torch.cat([torch.arange(len(taps), device=device), own])
        block = torch.arange(num, device=device).repeat_interleave(rows)
        seen = torch.cat(
            [
                positions[: len(taps)] < anchors.repeat_interleave(rows)[:, None],
                block[:, None] == block,
            ],
            dim=1,
        )
        for layer in self.layers:
            x = self._run_layer(layer, x, context, positions, seen)
        normed: Tensor = self.norm(x)
        return normed.view(num, rows, hidden)

    def _run_layer(
        self, layer: Any, x: Tensor, context: Tensor, positions: Tensor, seen: Tensor
    ) -> Tensor:
        attention, mlp = layer["self_attn"], layer["mlp"]
        normed = layer["input_layernorm"](x)
        both = torch.cat([context, normed])
        q = self._heads(attention, "q", normed, positions[-len(x) :])
        k = self._heads(attention, "k", both, positions)
        v = attention["v_proj"](both).view(len(both), -1, self.config.head_dim).transpose(0, 1)
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None].to(q.dtype), attn_mask=seen, enable_gqa=True
        )
        x = x + attention["o_proj"](out[0].transpose(0, 1).flatten(1))
        normed = layer["post_attention_layernorm"](x)
        gated = F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed)
        return x + mlp["down_proj"](gated)  # type: ignore[no-any-return]

    def _heads(self, attention: Any, kind: str, x: Tensor, positions: Tensor) -> Tensor:
        """Return queries or keys, normed and rotated: [heads, rows, dim]."""
        rows = attention[f"{kind}_proj"](x).view(len(x), -1, self.config.head_dim)
        cos, sin = self.rotary(x, positions[None])
        return rotate(attention[f"{kind}_norm"](rows).transpose(0, 1), cos, sin)


def _layer(config: Any) -> nn.ModuleDict:
    hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim

    def linear(rows: int, columns: int) -> nn.Linear:
        return nn.Linear(columns, rows, bias=False)

    return nn.ModuleDict(
        {
            "self_attn": nn.ModuleDict(
                {
                    "q_proj": linear(queries, hidden),
                    "k_proj": linear(keys, hidden),
                    "v_proj": linear(keys, hidden),
                    "o_proj": linear(hidden, queries),
                    "q_norm": Norm(config.head_dim, eps),
                    "k_norm": Norm(config.head_dim, eps),
                }
            ),
            "mlp": nn.ModuleDict(
                {
                    "gate_proj": linear(inner, hidden),
                    "up_proj": linear(inner, hidden),
                    "down_proj": linear(hidden, inner),
                }
            ),
            "input_layernorm": Norm(hidden, eps),
            "post_attention_layernorm": Norm(hidden, eps),
        }
    )
