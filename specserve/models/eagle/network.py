"""The forward pass of an EAGLE-3 head: one decoder layer over token and hidden state.

Row i is token i with the state behind token i - 1, which the target computed or, for a draft token,
the head itself. Its own output is the state behind token i until the target's is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.models.attention import Attention, AttentionVariant, Rotation
from specserve.models.cache import PagedCache
from specserve.models.checkpoints.load import llama_rotary
from specserve.models.eagle.checkpoint import EagleWeights
from specserve.models.eagle.states import OWN, TARGETS, UNKNOWN, previous_slots
from specserve.models.layers import (
    HeadShape,
    PackedLinear,
    PlainLinear,
    RMSNorm,
    join_linears,
    make_linear,
    take_gate,
    take_linear,
)
from specserve.models.layout import Layout
from specserve.models.llama import rotary_table

KEY_PADDING = 8
"""Numbers added to each key, of which the first is a score for all queries.

One would do, but kernels of GPUs take multiples of 8.
"""
BLOCKED = -1e4
"""That score of a key without a state, which no softmax gives any weight beside others."""
UNDRAFTED = -1e4
"""Logit of the target's tokens that the head does not know.

It is finite: where a grammar allows no other tokens, they are drawn.
"""


class EagleProjection:
    """The product that joins three hidden states of the target into one state of the head."""

    def __init__(self, weights: EagleWeights, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._fc = make_linear(weights.read("fc.weight").to(device, dtype))
        self._norm = None
        if weights.info.norm_before_fc:
            self._norm = RMSNorm(
                weights.read("input_norm.weight").to(device, dtype), weights.info.layer.rms_norm_eps
            )

    @torch.inference_mode()
    def __call__(self, taps: Tensor) -> Tensor:  # [rows, taps * target hidden] -> [rows, hidden]
        taps = taps.to(self._device, self._dtype)
        return self._fc.forward(taps if self._norm is None else self._norm(taps))


class EagleNetwork:
    """Embedding, the layer, its norms, and the vocabulary head."""

    def __init__(
        self,
        weights: EagleWeights,
        cache: PagedCache,
        *,
        embedding: Tensor,  # [vocab, hidden]
        attention: Attention,
        context: int,
    ) -> None:
        info, config = weights.info, weights.info.layer
        device, dtype = cache.device, cache.states.dtype
        assert not attention.rotates, "keys are padded behind their rotation"
        self.run_rows, self._attention, self._cache = attention.run_rows, attention, cache
        self._embedding, self._vocab_size = embedding, info.vocab_size
        self._norm_before_residual = info.norm_before_residual
        dim = config.head_dim
        self._heads = HeadShape(config.num_attention_heads, config.num_key_value_heads, dim)
        self._variant = AttentionVariant(scaling=dim**-0.5)

        def read(name: str) -> Tensor:
            return weights.read(name).to(device, dtype)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(read(f"{name}.weight"), config.rms_norm_eps)

        def linears(owner: str, *names: str) -> Any:
            """Return an object with these linear layers, as the library's modules have them."""
            return SimpleNamespace(
                **{
                    name: SimpleNamespace(
                        weight=read(f"{owner}.{name}.weight"),
                        bias=read(bias) if (bias := f"{owner}.{name}.bias") in weights else None,
                    )
                    for name in names
                }
            )

        layer = "layers.0"
        own = linears(f"{layer}.self_attn", "q_proj", "k_proj", "v_proj", "o_proj")
        mlp = linears(f"{layer}.mlp", "gate_proj", "up_proj", "down_proj")
        self._qkv = join_linears(own, "q_proj", "k_proj", "v_proj")
        self._out = take_linear(own, "o_proj")
        self._gate, self._down = (
            take_gate(mlp, "gate_proj", "up_proj"),
            take_linear(mlp, "down_proj"),
        )
        self._norm_token, self._norm_state = (
            norm(f"{layer}.input_layernorm"),
            norm(f"{layer}.hidden_norm"),
        )
        self._norm_mlp, self._norm_head = norm(f"{layer}.post_attention_layernorm"), norm("norm")
        self._norms_qk = (
            (norm(f"{layer}.self_attn.q_norm"), norm(f"{layer}.self_attn.k_norm"))
            if f"{layer}.self_attn.q_norm.weight" in weights
            else None
        )
        self._head: PackedLinear | PlainLinear = make_linear(read("lm_head.weight"))
        ids = weights.target_ids()
        self._target_ids = None if ids is None else ids.to(device)
        self._rotary = rotary_table(
            llama_rotary(config).to(device), embedding[:1].to(dtype), context
        )

    def logits(self, ids: Tensor, layout: Layout, rows: Tensor | None) -> Tensor:
        x = self._last_states(ids, layout)
        return self._logits(x if rows is None else x.index_select(0, rows))

    def logits_in_parts(
        self, ids: Tensor, layout: Layout, parts: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        x = self._last_states(ids, layout)
        for rows in parts:
            yield self._logits(x.index_select(0, rows))

    def _last_states(self, ids: Tensor, layout: Layout) -> Tensor:  # [rows] -> [rows, hidden]
        """Run the layer, and keep its outputs as the states behind rows without one of the target.

        The state behind the last row of a sequence is never the target's yet. That behind any other
        row is read by the next row of this pass, so it was there before.
        """
        states, previous = self._cache.states, previous_slots(layout)
        read = states.index_select(0, previous)[:, :-1]  # [rows, hidden]
        known = ~read[:, :1].isnan() & (layout.positions > 0)[:, None]  # [rows, 1]
        tokens = self._embedding.index_select(0, ids).to(states.dtype)
        x = self._layer(tokens, read.where(known, 0), known, layout)
        is_last = torch.ones_like(layout.slots, dtype=torch.bool)
        is_last[:-1] = previous[1:] != layout.slots[:-1]
        kept = states.index_select(0, layout.slots)
        is_own = is_last[:, None] | (kept[:, -1:] != TARGETS)
        own = F.pad(x.where(known, UNKNOWN), (0, 1), value=OWN)
        states.index_copy_(0, layout.slots, torch.where(is_own, own, kept))
        return x

    def _layer(self, tokens: Tensor, states: Tensor, known: Tensor, layout: Layout) -> Tensor:
        normed = self._norm_state(states)
        x = normed if self._norm_before_residual else states
        attended = self._attend(
            torch.cat([self._norm_token(tokens), normed], dim=-1), known, layout
        )
        x = self._out.add_to_residual(attended, x)
        return self._down.add_to_residual(self._gate.forward(self._norm_mlp(x)), x)

    def _attend(self, x: Tensor, known: Tensor, layout: Layout) -> Tensor:
        """Attend to the rows with a state: the score of any other key is far below all others."""
        query, kv, dim = self._heads.query, self._heads.kv, self._heads.dim
        qkv = self._qkv.forward(x).view(-1, query + 2 * kv, dim)
        q, k = qkv[:, :query], qkv[:, query : query + kv]
        if self._norms_qk is not None:
            q, k = self._norms_qk[0](q), self._norms_qk[1](k)
        qk = Rotation(self._rotary, layout.positions).apply(torch.cat([q, k], dim=1))
        qk = F.pad(qk, (0, KEY_PADDING))
        qk[:, :query, dim] = 1
        qk[:, query:, dim] = torch.where(known, 0.0, BLOCKED).to(qk.dtype)
        out = self._attention.attend(
            layout,
            self._cache.keys[0],
            self._cache.values[0],
            qk[:, :query],
            qk[:, query:],
            qkv[:, query + kv :],
            self._variant,
        )
        return out.reshape(-1, query * dim)

    def _logits(self, x: Tensor) -> Tensor:  # [rows, hidden] -> [rows, the target's vocabulary]
        logits = self._head.forward(self._norm_head(x))
        if self._target_ids is None:
            return logits
        whole = logits.new_full((len(logits), self._vocab_size), UNDRAFTED)
        return whole.index_copy_(1, self._target_ids, logits)
