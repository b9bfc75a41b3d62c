"""An EAGLE-3 head for training: whole windows at once, unrolled over several draft tokens.

Knows no KV cache and no target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.features.eagle.checkpoint import NUM_TAPS
from specserve.models.checkpoints.library import llama_rotary

DEPTHS = 4
"""Draft tokens that the training unrolls: the first from the target's states, the others from the
head's own, as in decoding (training-time test, 2503.01840)."""


class Norm(nn.Module):
    """RMSNorm with the name of its weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (len(self.weight),), self.weight, self.eps)


class EagleModule(nn.Module):
    """A head with the names of its files, for training: whole windows, several depths at once."""

    def __init__(self, config: Any, *, target_hidden: int, draft_vocab: int) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.heads, self.kv_heads, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )

        def linear(rows: int, columns: int) -> nn.Linear:
            return nn.Linear(columns, rows, bias=False)

        self.fc = linear(hidden, NUM_TAPS * target_hidden)
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": linear(self.heads * self.dim, 2 * hidden),
                        "k_proj": linear(self.kv_heads * self.dim, 2 * hidden),
                        "v_proj": linear(self.kv_heads * self.dim, 2 * hidden),
                        "o_proj": linear(hidden, self.heads * self.dim),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": linear(inner, hidden),
                        "up_proj": linear(inner, hidden),
                        "down_proj": linear(hidden, inner),
                    }
                ),
                "hidden_norm": Norm(hidden, eps),
                "input_layernorm": Norm(hidden, eps),
                "post_attention_layernorm": Norm(hidden, eps),
            }
        )
        self.norm = Norm(hidden, eps)
        self.lm_head = linear(draft_vocab, hidden)
        self.rotary = llama_rotary(config)

    def unroll(self, taps: Tensor, tokens: Tensor, depths: int) -> Iterator[Tensor]:
        """Yield log q [rows, draft vocabulary] of each depth.

        `taps` [rows, 3 * target hidden] are the target's states after the first tokens, and
        `tokens` [rows + depths, hidden] the embeddings of all tokens after the first. Row i at
        depth j follows token i + j + 1; it attends to depth 0 of the rows up to its own, and to the
        earlier depths of its own.
        """
        layer: Any = self.midlayer
        states, rows = self.fc(taps), len(taps)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for depth in range(depths):
            both = torch.cat(
                [
                    layer["input_layernorm"](tokens[depth : depth + rows]),
                    layer["hidden_norm"](states),
                ],
                dim=-1,
            )
            q, k, v = self._project(both, depth)
            keys.append(k)
            values.append(v)
            x = states + layer["self_attn"]["o_proj"](_attend(q, keys, values))
            normed, mlp = layer["post_attention_layernorm"](x), layer["mlp"]
            states = x + mlp["down_proj"](F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
            yield self.lm_head(self.norm(states)).log_softmax(-1)

    def _project(self, x: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v as [heads, rows, dim], keys and values once for each query head."""
        attention: Any = self.midlayer["self_attn"]
        q = attention["q_proj"](x).view(-1, self.heads, self.dim).transpose(0, 1)
        k, v = (
            attention[name](x)
            .view(-1, self.kv_heads, self.dim)
            .transpose(0, 1)
            .repeat_interleave(self.heads // self.kv_heads, 0)
            for name in ("k_proj", "v_proj")
        )
        cos, sin = self.rotary(x, torch.arange(len(x), device=x.device)[None] + depth)
        return rotate(q, cos, sin), rotate(k, cos, sin), v


def _attend(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attend to depth 0 of the rows up to each row's own, and to later depths of its own row."""
    scores = q @ keys[0].transpose(1, 2)  # [heads, rows, rows]
    hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    own = [(q * k).sum(-1, keepdim=True) for k in keys[1:]]
    weights = (
        torch.cat([scores.masked_fill(hidden, -torch.inf), *own], dim=-1) * q.shape[-1] ** -0.5
    ).softmax(-1)
    rows = q.shape[1]
    out: Tensor = weights[..., :rows] @ values[0]
    for i, v in enumerate(values[1:]):
        out = out + weights[..., rows + i, None] * v
    return out.transpose(0, 1).flatten(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
