"""T5 and its kin: the encoder runs once for each input; the decoder attends to it in every pass.

Positions are relative: each stack adds a learned number to its scores by the distance of key and
query, the same in all its layers. The encoder's output is kept as each decoder layer's keys and
values of it, in pages of the KV cache. Works on packed rows; knows no sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specserve.models.attention import AttentionVariant, GroupedAttention, attend_cached
from specserve.models.attention_kernels import invariant_kernel
from specserve.models.cache import PagedCache
from specserve.models.checkpoints.load import LoadedModel
from specserve.models.layers import (
    AnyLinear,
    HeadShape,
    join_linears,
    take_head,
    take_linear,
)
from specserve.models.layout import AttentionGroup, Layout
from specserve.models.norm import RMSNorm
from specserve.models.shard import GatheredHead, Shard

ATTENTION = GroupedAttention(invariant_kernel)
UNSCALED = AttentionVariant(scaling=1.0)  # the weights include 1/sqrt(dim)


class T5Network:
    """Encoder and decoder.

    Row-invariant as the other networks are: an encoder input is always encoded by products of the
    same shapes, whatever shares its pass.
    """

    def __init__(self, loaded: LoadedModel, cache: PagedCache, *, shard: Shard | None) -> None:
        module: Any = loaded.module
        spec = loaded.spec
        heads = HeadShape(spec.num_heads, spec.kv_heads, spec.head_dim)
        self.cache, self.run_rows = cache, None
        self.embedding = module.shared.weight.detach()
        self.encoder_bias = RelativePositionBias(module.encoder, causal=False)
        self.decoder_bias = RelativePositionBias(module.decoder, causal=True)
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
        self.head = take_head(module)

    @property
    def sharded_head(self) -> GatheredHead | None:
        return self.head if isinstance(self.head, GatheredHead) else None

    def encode(self, ids: Tensor, lengths: Sequence[int], slots: Tensor) -> None:
        """Encode concatenated encoder inputs, and write their keys and values into `slots`."""
        x = self.embedding.index_select(0, ids)  # [rows, hidden]
        biases = {length: self.encoder_bias.for_encoder(length) for length in lengths}
        for layer in self.encoder:
            x = layer.forward(x, [biases[length] for length in lengths])
        states = self.encoder_norm(x)
        for decoder_layer, keys, values in zip(
            self.decoder, self.cache.keys, self.cache.values, strict=True
        ):
            k, v = decoder_layer.encoder_keys_values(states)
            keys.index_copy_(0, slots, k)
            values.index_copy_(0, slots, v)

    def logits(self, ids: Tensor, layout: Layout, rows: Tensor | None) -> Tensor:
        x = self.embedding.index_select(0, ids)  # [rows, hidden]
        groups = tuple(
            replace(group, relative_bias=self.decoder_bias.for_group(group))
            for group in layout.groups
        )
        layout = replace(layout, groups=groups)
        for layer, keys, values in zip(
            self.decoder, self.cache.keys, self.cache.values, strict=True
        ):
            x = layer.forward(x, layout, keys, values)
        if rows is not None:
            x = x.index_select(0, rows)
        return self.head(self.norm(x) * self.scale)  # type: ignore[no-any-return]

    def logits_in_parts(
        self, ids: Tensor, layout: Layout, parts: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        raise NotImplementedError("an encoder-decoder does not predict its prompt")


class RelativePositionBias:
    """The bias that a stack adds to its scores by how far ahead of the query a key lies.

    In a decoder it is -inf for all keys ahead of the query.
    """

    def __init__(self, stack: Any, *, causal: bool) -> None:
        attention = stack.block[0].layer[0].SelfAttention
        # All distances from here on have the same bias.
        self.max_distance: int = attention.relative_attention_max_distance
        table = attention.compute_bias(
            1, 2 * self.max_distance + 1, past_seen_tokens=self.max_distance
        )  # [1, heads, 1, distances]
        self.table = table[0, :, 0].float()
        if causal:
            self.table[:, self.max_distance + 1 :] = float("-inf")

    def for_encoder(self, length: int) -> Tensor:  # [heads, length, length]
        positions = torch.arange(length, device=self.table.device)
        return self._look_up(positions - positions[:, None])

    def for_group(self, group: AttentionGroup) -> Tensor:  # [seqs, heads, queries, 1, context]
        return (
            self._look_up(group.pages.keys - group.last_keys[:, :, None])
            .transpose(0, 1)
            .contiguous()
            .unsqueeze(3)
        )

    def _look_up(self, distances: Tensor) -> Tensor:  # [heads, *distances.shape]
        at = distances.clamp(-self.max_distance, self.max_distance).add_(self.max_distance)
        found: Tensor = self.table.index_select(1, at.flatten())
        return found.view(-1, *at.shape)


class EncoderLayer:
    """A layer in which every token of an encoder input sees all of it.

    Inputs attend one by one, so that the shapes of an input's products depend on it alone.
    """

    def __init__(self, block: Any, heads: HeadShape, shard: Shard | None) -> None:
        attention = block.layer[0].SelfAttention
        self.heads, self.shard, self.norm = heads, shard, _norm(block.layer[0].layer_norm)
        self.qkv, self.out = join_linears(attention, "q", "k", "v"), take_linear(attention, "o")
        self.mlp = FeedForward(block.layer[-1], shard)

    def forward(self, x: Tensor, biases: Sequence[Tensor]) -> Tensor:
        """Compute the layer; the biases, each [heads, length, length], delimit the inputs."""
        qkv = self.qkv.forward(self.norm(x)).view(-1, 3, self.heads.query, self.heads.dim)
        parts = torch.split(qkv, [bias.shape[1] for bias in biases])
        attended = torch.cat(
            [_attend_all(part, bias) for part, bias in zip(parts, biases, strict=True)]
        )
        return self.mlp.forward(_add_to_residual(self.out, attended, x, self.shard))


class DecoderLayer:
    """A layer that sees the text up to the query, then all of the encoder input."""

    def __init__(self, block: Any, heads: HeadShape, shard: Shard | None) -> None:
        own, cross = block.layer[0].SelfAttention, block.layer[1].EncDecAttention
        self.heads, self.shard = heads, shard
        self.norm, self.norm_cross = (
            _norm(block.layer[0].layer_norm),
            _norm(block.layer[1].layer_norm),
        )
        self.qkv, self.out = join_linears(own, "q", "k", "v"), take_linear(own, "o")
        self.q_cross, self.kv_cross, self.out_cross = (
            take_linear(cross, "q"),
            join_linears(cross, "k", "v"),
            take_linear(cross, "o"),
        )
        self.mlp = FeedForward(block.layer[-1], shard)

    def encoder_keys_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return this layer's cross-attention keys and values, both [rows, heads, dim]."""
        k, v = self.kv_cross.forward(states).view(-1, 2, self.heads.query, self.heads.dim).unbind(1)
        return k, v

    def forward(self, x: Tensor, layout: Layout, keys: Tensor, values: Tensor) -> Tensor:
        heads, dim = self.heads.query, self.heads.dim
        q, k, v = self.qkv.forward(self.norm(x)).view(-1, 3, heads, dim).unbind(1)
        attended = ATTENTION.attend(layout, keys, values, q, k, v, UNSCALED)
        x = _add_to_residual(self.out, attended.reshape(-1, heads * dim), x, self.shard)
        q = self.q_cross.forward(self.norm_cross(x)).view(-1, heads, dim)
        attended = attend_cached(
            layout.cross_groups, keys, values, q, variant=UNSCALED, kernel=ATTENTION.kernel
        )
        x = _add_to_residual(self.out_cross, attended.reshape(-1, heads * dim), x, self.shard)
        return self.mlp.forward(x)


class FeedForward:
    """One inner product under an activation, or two of which one is the other's gate."""

    def __init__(self, layer: Any, shard: Shard | None) -> None:
        dense = layer.DenseReluDense
        self.norm, self.shard, self.activation = _norm(layer.layer_norm), shard, dense.act
        self.is_gated = hasattr(dense, "wi_0")
        self.inner = (
            join_linears(dense, "wi_0", "wi_1") if self.is_gated else take_linear(dense, "wi")
        )
        self.out = take_linear(dense, "wo")

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner.forward(self.norm(x))
        if self.is_gated:
            gate, up = inner.chunk(2, dim=-1)
            return _add_to_residual(self.out, self.activation(gate) * up, x, self.shard)
        return _add_to_residual(self.out, self.activation(inner), x, self.shard)


def _attend_all(
    qkv: Tensor, bias: Tensor
) -> Tensor:  # [length, 3, heads, dim], [heads, length, length] -> [length, heads * dim]
    q, k, v = qkv.permute(1, 2, 0, 3).unbind(0)  # each [heads, length, dim]
    weights = torch.add(bias, torch.bmm(q, k.transpose(1, 2))).softmax(-1)  # in fp32
    return torch.bmm(weights.to(v.dtype), v).transpose(0, 1).reshape(len(qkv), -1)


def _add_to_residual(out: AnyLinear, x: Tensor, residual: Tensor, shard: Shard | None) -> Tensor:
    """Add a row-wise layer's output, of all ranks, to the residual."""
    if shard is None:
        return out.add_to_residual(x, residual)
    return shard.add_to_residual(out, x, residual)


def _norm(norm: Any) -> RMSNorm:
    return RMSNorm(norm.weight, norm.variance_epsilon)
