"""The forward pass of Llama-shaped models, in fewer operations than the library's."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from specserve.models.attention import Attention, AttentionVariant, Rotation
from specserve.models.cache import PagedCache
from specserve.models.checkpoints.load import LoadedModel
from specserve.models.float8_pages import PageScales
from specserve.models.hidden_taps import HiddenTaps
from specserve.models.layers import (
    AnyLinear,
    HeadShape,
    ScaledLinear,
    join_linears,
    take_gate,
    take_head,
    take_linear,
)
from specserve.models.layout import Layout
from specserve.models.norm import RMSNorm
from specserve.models.shard import GatheredHead, Shard

if TYPE_CHECKING:
    from specserve.models.cpu.compiled_layers import CompiledLayers


class FusedNetwork:
    """Embedding, layers, norm and head.

    The arithmetic is the library's, in some 25 operations a layer instead of 60.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: PagedCache,
        *,
        attention: Attention,
        shard: Shard | None,
        returns_hidden: bool = False,
        taps: HiddenTaps | None = None,
    ) -> None:
        module: Any = loaded.module
        config, body = loaded.config, module.model
        self.returns_hidden, self.run_rows = returns_hidden, attention.run_rows
        self.embedding: Tensor = body.embed_tokens.weight.detach()
        self._embedding_scale: float = getattr(config, "embedding_multiplier", 1.0)  # of Granite
        self._logits_scale: float = getattr(config, "logits_scaling", 1.0)
        self.layers = _fused_layers(loaded, cache, attention, shard)
        self.keys, self.values = cache.keys, cache.values  # of each layer
        self.norm = RMSNorm(body.norm.weight, config.rms_norm_eps)
        self._head = take_head(module)
        self._compiled: CompiledLayers | Literal[False] | None = None  # None: not yet known
        self.rotary = rotary_table(body.rotary_emb, self.embedding, loaded.spec.max_context)
        self._unrotated = None if all(_layer_rotations(config)) else _identity_table(self.rotary)
        self._taps = taps
        self._parts = [] if taps is None else self._parts_between(taps.layers)

    def logits(self, ids: Tensor, layout: Layout, rows: Tensor | None) -> Tensor:
        return self.finish(self.run_layers(ids, layout), rows)

    def logits_in_parts(
        self, ids: Tensor, layout: Layout, parts: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        x = self.run_layers(ids, layout)
        for rows in parts:
            yield self.finish(x, rows)

    def run_layers(self, ids: Tensor, layout: Layout) -> Tensor:  # [rows] -> [rows, hidden]
        rotation, x = Rotation(self.rotary, layout.positions), self.embed(ids)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if self._taps is None:
            return self._through_layers(x, rotation, layout)
        for first, part in self._parts:
            self._taps.add(first, x)
            x = part._through_layers(x, rotation, layout)
        self._taps.add(len(self.layers), x)
        return x

    def _parts_between(self, layers: Sequence[int]) -> list[tuple[int, FusedNetwork]]:
        """Return networks of the layers between the tapped ones, each with its first layer."""
        num, every = len(self.layers), set(range(len(self.layers)))
        bounds = sorted({0, num, *layers})
        return [
            (first, self.without_layers(every - set(range(first, stop))))
            for first, stop in pairwise(bounds)
        ]

    def finish(self, x: Tensor, rows: Tensor | None) -> Tensor:  # [n, hidden] -> [rows, vocab]
        x = self.norm(x if rows is None else x.index_select(0, rows))
        logits = self.head(x)
        if self._logits_scale != 1.0:
            logits = logits / self._logits_scale
        return torch.cat([logits, x], dim=-1) if self.returns_hidden else logits

    def _through_layers(self, x: Tensor, rotation: Rotation, layout: Layout) -> Tensor:
        if self._compiled is None:  # not before, since the weights of a plan have no address
            self._compiled = x.is_cpu and _compile(self.layers, self.keys, self.values)
        if self._compiled and len(x) <= self._compiled.max_rows:
            return self._compiled.forward(x, layout, rotation)
        unrotated = self._unrotated
        identity = rotation if unrotated is None else Rotation(unrotated, layout.positions)
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            own = rotation if layer.rotates else identity
            x = layer.forward(x, own, layout, keys, values)
        return x

    def without_layers(self, skip: Collection[int]) -> FusedNetwork:
        other, other._compiled, other._taps = copy.copy(self), None, None
        kept = [i for i in range(len(self.layers)) if i not in skip]
        other.layers = [self.layers[i] for i in kept]
        other.keys, other.values = [self.keys[i] for i in kept], [self.values[i] for i in kept]
        return other

    @property
    def sharded_head(self) -> GatheredHead | None:
        return self._head if isinstance(self._head, GatheredHead) else None

    def embed(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.embedding.index_select(0, ids)
        return rows

    def head(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)  # type: ignore[no-any-return]


class FusedLayer:
    """One decoder layer: q, k and v in one product, both halves of the gated MLP in another."""

    def __init__(
        self,
        layer: Any,
        heads: HeadShape,
        *,
        window: int | None,
        rotates: bool,
        scaling: float,
        output_scale: float,
        scales: PageScales,
        attention: Attention,
        shard: Shard | None,
    ) -> None:
        own, mlp = layer.self_attn, layer.mlp
        self.heads, self.attention, self.shard = heads, attention, shard
        self.rotates = rotates
        self.variant = AttentionVariant(scaling=scaling, window=window, scales=scales)
        self.qkv = join_linears(own, "q_proj", "k_proj", "v_proj")
        self.out = _scaled(take_linear(own, "o_proj"), output_scale)
        self.gate = take_gate(mlp, "gate_proj", "up_proj")
        self.down = _scaled(take_linear(mlp, "down_proj"), output_scale)
        eps = layer.input_layernorm.variance_epsilon
        self.norm_in, self.norm_mlp = (
            RMSNorm(layer.input_layernorm.weight, eps),
            RMSNorm(layer.post_attention_layernorm.weight, eps),
        )
        self.norms_qk = (
            (RMSNorm(own.q_norm.weight, eps), RMSNorm(own.k_norm.weight, eps))
            if hasattr(own, "q_norm")
            else None
        )

    def forward(
        self, x: Tensor, rotation: Rotation, layout: Layout, keys: Tensor, values: Tensor
    ) -> Tensor:
        attended = self._attention(self.norm_in(x), rotation, layout, keys, values)
        x = self._add_to_residual(self.out, attended, x)
        return self._add_to_residual(self.down, self.gate.forward(self.norm_mlp(x)), x)

    def _attention(
        self, x: Tensor, rotation: Rotation, layout: Layout, keys: Tensor, values: Tensor
    ) -> Tensor:
        query, kv, dim = self.heads.query, self.heads.kv, self.heads.dim
        qkv = self.qkv.forward(x).view(-1, query + 2 * kv, dim)
        qk, v = qkv[:, : query + kv], qkv[:, query + kv :]
        if self.norms_qk is not None:
            qk = torch.cat(
                [self.norms_qk[0](qk[:, :query]), self.norms_qk[1](qk[:, query:])], dim=1
            )
        rotates = self.attention.rotates
        qk = qk if rotates else rotation.apply(qk)
        out = self.attention.attend(
            layout,
            keys,
            values,
            qk[:, :query],
            qk[:, query:],
            v,
            self.variant,
            rotation if rotates else None,
        )
        # Where every query head has its own keys, one sequence alone comes out transposed.
        return out.reshape(-1, query * dim)

    def _add_to_residual(
        self, linear: AnyLinear | ScaledLinear, x: Tensor, residual: Tensor
    ) -> Tensor:
        """Add a row-wise layer's output, of all ranks, to the residual."""
        return (
            linear.add_to_residual(x, residual)
            if self.shard is None
            else self.shard.add_to_residual(linear, x, residual)
        )


def _fused_layers(
    loaded: LoadedModel, cache: PagedCache, attention: Attention, shard: Shard | None
) -> list[FusedLayer]:
    module: Any = loaded.module
    config, spec = loaded.config, loaded.spec
    kinds, rotates = _layer_types(config), _layer_rotations(config)
    return [
        FusedLayer(
            module.model.layers[i],
            HeadShape(spec.num_heads, spec.kv_heads, spec.head_dim),
            window=config.sliding_window if kinds[i] == "sliding_attention" else None,
            rotates=rotates[i],
            scaling=getattr(config, "attention_multiplier", spec.head_dim**-0.5),
            output_scale=getattr(config, "residual_multiplier", 1.0),
            scales=scales,
            attention=attention,
            shard=shard,
        )
        for i, scales in zip(loaded.layers, cache.scales, strict=True)
    ]


def _scaled(linear: AnyLinear, scale: float) -> AnyLinear | ScaledLinear:
    return linear if scale == 1.0 else ScaledLinear(linear, scale)


def _compile(
    layers: Sequence[FusedLayer], keys: Sequence[Tensor], values: Sequence[Tensor]
) -> CompiledLayers | Literal[False]:
    """Return these layers as compiled code; False if they are none that it takes."""
    if not layers or not layers[0].attention.rotates:  # as compiled attention alone does
        return False
    from specserve.models.cpu.compiled_layers import CompiledLayers, can_compile

    return CompiledLayers(layers, keys, values) if can_compile(layers) else False


def _layer_types(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None)
    kind = (
        "sliding_attention"
        if getattr(config, "sliding_window", None) is not None
        else "full_attention"
    )
    return list(kinds) if kinds is not None else [kind] * config.num_hidden_layers


def _layer_rotations(config: Any) -> list[bool]:
    """Return which layers rotate queries and keys by their positions: mostly all."""
    stated = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    return [bool(rotates) for rotates in stated]


def rotary_table(
    rotary: Any, like: Tensor, positions: int
) -> Tensor:  # [positions, 2, 1, head_dim]
    """Return cos and sin of every position.

    The first half of sin is negative, so that a roll by half a head rotates.
    """
    cos, sin = rotary(like, torch.arange(positions, device=like.device)[None])
    sin = sin[0].clone()
    sin[:, : sin.shape[1] // 2].neg_()
    return torch.stack([cos[0], sin], dim=1).unsqueeze(2)


def _identity_table(table: Tensor) -> Tensor:  # [positions, 2, 1, head_dim]
    """Return a table that rotates by nothing, for the layers without rotation: their bits stay."""
    identity = torch.zeros_like(table)
    identity[:, 0] = 1.0
    return identity
