"""T5 and its kin: an encoder that reads a source once, and a decoder that looks at it in every pass. Packed rows; knows no sequences.

Position is distance here: each stack adds a learned number to its scores by how far key and query are apart, the same in all its layers.
What the encoder made of a source is kept as each decoder layer's keys and values of it, in pages of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specserve.models.attention import Rule, attend, invariant, look
from specserve.models.cache import PagedCache
from specserve.models.checkpoints.load import Loaded
from specserve.models.layers import PackedLinear, PlainLinear, joined, linear, moved, pack
from specserve.models.layout import Group, Layout
from specserve.models.network import Heads
from specserve.models.norm import Norm
from specserve.models.shard import Shard

UNSCALED = Rule(scaling=1.0)  # the weights have taken 1/sqrt(dim) in


class T5Network:
    """Both stacks. Row-invariant as the others are: a source is always encoded by products of the same shapes, whatever shares its pass."""

    def __init__(self, loaded: Loaded, cache: PagedCache, *, shard: Shard | None) -> None:
        module: Any = loaded.module
        spec = loaded.spec
        heads = Heads(spec.num_heads, spec.kv_heads, spec.head_dim)
        self.cache = cache
        self.embedding = module.shared.weight.detach()
        self.ahead_and_back = Distances(module.encoder, causal=False)
        self.back = Distances(module.decoder, causal=True)
        self.encoder = [EncoderLayer(block, heads, shard) for block in module.encoder.block]
        self.decoder = [DecoderLayer(block, heads, shard) for block in module.decoder.block]
        self.encoder_norm, self.norm = (
            _norm(module.encoder.final_layer_norm),
            _norm(module.decoder.final_layer_norm),
        )
        self.scale = (
            spec.hidden_size**-0.5
            if getattr(loaded.config, "scale_decoder_outputs", False)
            else 1.0
        )  # where the head is the embedding
        pack(module.lm_head)  # of a rank's share; the whole head is a plain linear itself
        self.head = (
            linear(module.lm_head.weight)
            if isinstance(module.lm_head, nn.Linear)
            else module.lm_head
        )

    def encode(self, ids: Tensor, lengths: Sequence[int], slots: Tensor) -> None:
        """Reads sources, one behind the other, and keeps what the decoder will look at in these slots."""
        x = self.embedding.index_select(0, ids)  # [rows, hidden]
        biases = {length: self.ahead_and_back.within(length) for length in lengths}
        for layer in self.encoder:
            x = layer.forward(x, [biases[length] for length in lengths])
        states = self.encoder_norm(x)
        for reader, keys, values in zip(
            self.decoder, self.cache.keys, self.cache.values, strict=True
        ):
            k, v = reader.seen(states)
            keys.index_copy_(0, slots, k)
            values.index_copy_(0, slots, v)

    def logits(self, ids: Tensor, layout: Layout, wanted: Tensor | None) -> Tensor:
        x = self.embedding.index_select(0, ids)  # [rows, hidden]
        layout = replace(
            layout,
            groups=tuple(replace(group, distances=self.back.of(group)) for group in layout.groups),
        )
        for layer, keys, values in zip(
            self.decoder, self.cache.keys, self.cache.values, strict=True
        ):
            x = layer.forward(x, layout, keys, values)
        if wanted is not None:
            x = x.index_select(0, wanted)
        return self.head(self.norm(x) * self.scale)  # type: ignore[no-any-return]


class Distances:
    """What a stack adds to its scores by how far ahead of the query a key lies; in a decoder, -inf for keys that lie ahead at all."""

    def __init__(self, stack: Any, *, causal: bool) -> None:
        attention = stack.block[0].layer[0].SelfAttention
        self.far: int = (
            attention.relative_attention_max_distance
        )  # from here on all distances are alike
        table = attention.compute_bias(
            1, 2 * self.far + 1, past_seen_tokens=self.far
        )  # [1, heads, 1, distances]
        self.table = table[0, :, 0].float()
        if causal:
            self.table[:, self.far + 1 :] = float("-inf")

    def within(self, length: int) -> Tensor:  # [heads, length, length]
        places = torch.arange(length, device=self.table.device)
        return self._at(places - places[:, None])

    def of(self, group: Group) -> Tensor:  # [seqs, heads, queries, 1, context]
        return (
            self._at(group.pages.keys - group.positions[:, :, None])
            .transpose(0, 1)
            .contiguous()
            .unsqueeze(3)
        )

    def _at(self, distances: Tensor) -> Tensor:  # [heads, *distances.shape]
        at = distances.clamp(-self.far, self.far).add_(self.far)
        found: Tensor = self.table.index_select(1, at.flatten())
        return found.view(-1, *at.shape)


class EncoderLayer:
    """Every token of a source sees all of it. Sources attend one by one, so that the shapes of a source's products are its own alone."""

    def __init__(self, block: Any, heads: Heads, shard: Shard | None) -> None:
        attention = block.layer[0].SelfAttention
        self.heads, self.shard, self.norm = heads, shard, _norm(block.layer[0].layer_norm)
        self.qkv, self.out = joined(attention, "q", "k", "v"), moved(attention, "o")
        self.mlp = FeedForward(block.layer[-1], shard)

    def forward(self, x: Tensor, biases: Sequence[Tensor]) -> Tensor:
        """The biases, each [heads, length, length], say where one source ends and the next begins."""
        qkv = self.qkv.forward(self.norm(x)).view(-1, 3, self.heads.own, self.heads.dim)
        parts = torch.split(qkv, [bias.shape[1] for bias in biases])
        seen = torch.cat([_whole(part, bias) for part, bias in zip(parts, biases, strict=True)])
        return self.mlp.forward(_plus(self.out, seen, x, self.shard))


class DecoderLayer:
    """Sees the text up to itself, then all of the source."""

    def __init__(self, block: Any, heads: Heads, shard: Shard | None) -> None:
        own, cross = block.layer[0].SelfAttention, block.layer[1].EncDecAttention
        self.heads, self.shard = heads, shard
        self.norm, self.norm_cross = (
            _norm(block.layer[0].layer_norm),
            _norm(block.layer[1].layer_norm),
        )
        self.qkv, self.out = joined(own, "q", "k", "v"), moved(own, "o")
        self.q_cross, self.kv_cross, self.out_cross = (
            moved(cross, "q"),
            joined(cross, "k", "v"),
            moved(cross, "o"),
        )
        self.mlp = FeedForward(block.layer[-1], shard)

    def seen(self, states: Tensor) -> tuple[Tensor, Tensor]:  # both [rows, heads, dim]
        """The keys and values of a source that this layer looks at."""
        k, v = self.kv_cross.forward(states).view(-1, 2, self.heads.own, self.heads.dim).unbind(1)
        return k, v

    def forward(self, x: Tensor, layout: Layout, keys: Tensor, values: Tensor) -> Tensor:
        own, dim = self.heads.own, self.heads.dim
        q, k, v = self.qkv.forward(self.norm(x)).view(-1, 3, own, dim).unbind(1)
        seen = attend(layout, keys, values, q, k, v, rule=UNSCALED, kernel=invariant)
        x = _plus(self.out, seen.reshape(-1, own * dim), x, self.shard)
        q = self.q_cross.forward(self.norm_cross(x)).view(-1, own, dim)
        seen = look(layout.cross, keys, values, q, rule=UNSCALED, kernel=invariant)
        x = _plus(self.out_cross, seen.reshape(-1, own * dim), x, self.shard)
        return self.mlp.forward(x)


class FeedForward:
    """One inner product under an activation, or two of which one is the other's gate."""

    def __init__(self, layer: Any, shard: Shard | None) -> None:
        dense = layer.DenseReluDense
        self.norm, self.shard, self.activation = _norm(layer.layer_norm), shard, dense.act
        self.is_gated = hasattr(dense, "wi_0")
        self.inner = joined(dense, "wi_0", "wi_1") if self.is_gated else moved(dense, "wi")
        self.out = moved(dense, "wo")

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner.forward(self.norm(x))
        if self.is_gated:
            gate, up = inner.chunk(2, dim=-1)
            return _plus(self.out, self.activation(gate) * up, x, self.shard)
        return _plus(self.out, self.activation(inner), x, self.shard)


def _whole(
    qkv: Tensor, bias: Tensor
) -> Tensor:  # [length, 3, heads, dim], [heads, length, length] -> [length, heads * dim]
    q, k, v = qkv.permute(1, 2, 0, 3).unbind(0)  # each [heads, length, dim]
    weights = torch.add(bias, torch.bmm(q, k.transpose(1, 2))).softmax(-1)  # in fp32
    return torch.bmm(weights.to(v.dtype), v).transpose(0, 1).reshape(len(qkv), -1)


def _plus(
    out: PackedLinear | PlainLinear, x: Tensor, residual: Tensor, shard: Shard | None
) -> Tensor:
    """A row-wise layer and what it is added to; between the two stands the sum over the ranks."""
    return out.plus(x, residual) if shard is None else residual + shard.sum(out.forward(x))


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight, norm.variance_epsilon)
