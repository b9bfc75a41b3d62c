"""The forward pass, twice: through the library's own modelling code for any architecture, and fused for the Llama-shaped ones."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.models.attention import Kernel, Rule, attend
from specserve.models.cache import PagedCache
from specserve.models.checkpoints.load import Loaded
from specserve.models.layers import PackedLinear, PlainLinear, joined, linear, moved, pack
from specserve.models.layout import Layout
from specserve.models.norm import Norm
from specserve.models.shard import Shard
from specserve.models.skip import without

LLAMA_SHAPED = ("llama", "mistral", "qwen2", "qwen3")
STATIC_ROTARY = (
    "default",
    "linear",
    "llama3",
    "yarn",
)  # the angle depends on the position alone, so that a table will do


class Network(Protocol):
    """Logits of the wanted rows (None: of all); keys and values of all rows land in the cache."""

    def logits(
        self, ids: Tensor, layout: Layout, wanted: Tensor | None
    ) -> Tensor: ...  # [wanted, vocab]


class Lending(Network, Protocol):
    """A network that others can draft with. If it `tells_hidden`, each row has behind the logits what the head made them of."""

    def without(self, skip: Collection[int]) -> Lending:
        """The same weights and pages, with some layers left out."""
        ...

    def embed(self, ids: Tensor) -> Tensor: ...  # [rows] -> [rows, hidden]

    def head(self, hidden: Tensor) -> Tensor: ...  # [rows, hidden] -> [rows, vocab]


def network(
    loaded: Loaded,
    cache: PagedCache,
    *,
    kernel: Kernel,
    shard: Shard | None,
    tells_hidden: bool = False,
) -> Lending:
    if can_fuse(loaded):
        return FusedNetwork(loaded, cache, kernel=kernel, shard=shard, tells_hidden=tells_hidden)
    return LibraryNetwork(loaded, cache, kernel=kernel, tells_hidden=tells_hidden)


def can_fuse(loaded: Loaded) -> bool:
    config = loaded.config
    rotary = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in LLAMA_SHAPED
        and config.hidden_act == "silu"
        and rotary.get("rope_type", "default") in STATIC_ROTARY
        and rotary.get("partial_rotary_factor", 1.0) == 1.0
    )


class LibraryNetwork:
    """The library's modelling code over packed rows; only the attention is ours, and the linears are packed."""

    def __init__(
        self, loaded: Loaded, cache: PagedCache, *, kernel: Kernel, tells_hidden: bool = False
    ) -> None:
        module: Any = loaded.module
        self.module = module
        self.attention = PagedAttention(cache, kernel, loaded.kept)
        self._told: list[Tensor] = []  # what the head was given in the pass under way
        for part in module.modules():
            if isinstance(getattr(part, "layer_idx", None), int):
                part.paged_attention = self.attention
        pack(module)
        if tells_hidden:
            module.get_output_embeddings().register_forward_pre_hook(
                lambda _, given: self._told.append(given[0][0])
            )

    def logits(self, ids: Tensor, layout: Layout, wanted: Tensor | None) -> Tensor:
        self.attention.layout = layout
        out = self.module(
            input_ids=ids[None],
            position_ids=layout.positions[None],
            use_cache=False,
            logits_to_keep=0 if wanted is None else wanted,
        )
        logits: Tensor = out.logits[0]
        return torch.cat([logits, self._told.pop()], dim=-1) if self._told else logits

    def without(self, skip: Collection[int]) -> Lending:
        other = copy.copy(self)
        other.module = without(self.module, skip)
        return other

    def embed(self, ids: Tensor) -> Tensor:
        return self.module.get_input_embeddings()(ids)  # type: ignore[no-any-return]

    def head(self, hidden: Tensor) -> Tensor:
        """As it is: what an architecture does to its logits afterwards is left out."""
        logits: Tensor = self.module.get_output_embeddings()(hidden[None])[0]
        self._told.clear()
        return logits


class PagedAttention:
    """What the attention modules of one model share: the cache, and the layout of the pass under way."""

    def __init__(self, cache: PagedCache, kernel: Kernel, layers: Sequence[int]) -> None:
        self.kernel = kernel
        self.keys, self.values = (
            dict(zip(layers, pools, strict=True)) for pools in (cache.keys, cache.values)
        )  # by layer
        self.layout: Layout | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        assert self.layout is not None
        return attend(
            self.layout,
            self.keys[layer],
            self.values[layer],
            q,
            k,
            v,
            rule=rule,
            kernel=self.kernel,
        )


def library_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, rows, dim]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The function that is registered with the library under the name "specserve"."""
    rule = Rule(
        query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return module.paged_attention(module.layer_idx, q, k, v, rule)[None], None  # type: ignore[operator]


class FusedNetwork:
    """Embedding, layers, norm, head. Same arithmetic as the library's, in some 25 operations a layer instead of 60."""

    def __init__(
        self,
        loaded: Loaded,
        cache: PagedCache,
        *,
        kernel: Kernel,
        shard: Shard | None,
        tells_hidden: bool = False,
    ) -> None:
        module: Any = loaded.module
        config, spec, body = loaded.config, loaded.spec, module.model
        self.tells_hidden = tells_hidden
        self.embedding: Tensor = body.embed_tokens.weight.detach()
        windows = [
            config.sliding_window if kind == "sliding_attention" else None
            for kind in _layer_types(config)
        ]
        self.layers = [
            FusedLayer(
                body.layers[i],
                Heads(spec.num_heads, spec.kv_heads, spec.head_dim),
                window=windows[i],
                kernel=kernel,
                shard=shard,
            )
            for i in loaded.kept
        ]
        self.keys, self.values = cache.keys, cache.values  # of each layer
        self.norm = Norm(body.norm.weight, config.rms_norm_eps)
        pack(module.lm_head)  # of a rank's share; the whole head is a plain linear itself
        self._head = (
            linear(module.lm_head.weight, module.lm_head.bias)
            if isinstance(module.lm_head, nn.Linear)
            else module.lm_head
        )
        self.rotary = _rotary_table(body.rotary_emb, self.embedding, spec.max_context)

    def logits(self, ids: Tensor, layout: Layout, wanted: Tensor | None) -> Tensor:
        x = self.embed(ids)  # [rows, hidden]
        cos, sin = self.rotary.index_select(0, layout.positions).unbind(
            1
        )  # [rows, 1, head_dim] both
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            x = layer.forward(x, cos, sin, layout, keys, values)
        if wanted is not None:
            x = x.index_select(0, wanted)
        x = self.norm(x)
        logits = self.head(x)
        return torch.cat([logits, x], dim=-1) if self.tells_hidden else logits

    def without(self, skip: Collection[int]) -> Lending:
        other, kept = copy.copy(self), [i for i in range(len(self.layers)) if i not in skip]
        other.layers = [self.layers[i] for i in kept]
        other.keys, other.values = [self.keys[i] for i in kept], [self.values[i] for i in kept]
        return other

    def embed(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.embedding.index_select(0, ids)
        return rows

    def head(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Heads:
    own: int  # query heads
    shared: int  # key and value heads
    dim: int


class FusedLayer:
    """One decoder layer: q, k and v in one product, gate and up in another."""

    def __init__(
        self, layer: Any, heads: Heads, *, window: int | None, kernel: Kernel, shard: Shard | None
    ) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.heads, self.kernel, self.shard = heads, kernel, shard
        self.rule = Rule(scaling=heads.dim**-0.5, window=window)
        self.qkv = joined(attention, "q_proj", "k_proj", "v_proj")
        self.out = moved(attention, "o_proj")
        self.gate_up = joined(mlp, "gate_proj", "up_proj")
        self.down = moved(mlp, "down_proj")
        eps = layer.input_layernorm.variance_epsilon
        self.norm_in, self.norm_mlp = (
            Norm(layer.input_layernorm.weight, eps),
            Norm(layer.post_attention_layernorm.weight, eps),
        )
        self.norms_qk = (
            (Norm(attention.q_norm.weight, eps), Norm(attention.k_norm.weight, eps))
            if hasattr(attention, "q_norm")
            else None
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, keys: Tensor, values: Tensor
    ) -> Tensor:
        x = self._plus(
            self.out, self._attention(self.norm_in(x), cos, sin, layout, keys, values), x
        )
        gate, up = self.gate_up.forward(self.norm_mlp(x)).chunk(2, dim=-1)
        return self._plus(self.down, F.silu(gate).mul_(up), x)

    def _attention(
        self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, keys: Tensor, values: Tensor
    ) -> Tensor:
        own, shared, dim = self.heads.own, self.heads.shared, self.heads.dim
        qkv = self.qkv.forward(x).view(-1, own + 2 * shared, dim)
        qk, v = qkv[:, : own + shared], qkv[:, own + shared :]
        if self.norms_qk is not None:
            qk = torch.cat([self.norms_qk[0](qk[:, :own]), self.norms_qk[1](qk[:, own:])], dim=1)
        qk = torch.addcmul(
            qk * cos, qk.roll(dim // 2, -1), sin
        )  # sin carries the sign of the rotated half
        out = attend(
            layout, keys, values, qk[:, :own], qk[:, own:], v, rule=self.rule, kernel=self.kernel
        )
        return out.reshape(
            -1, own * dim
        )  # where every head has its own keys, one sequence alone comes out transposed

    def _plus(self, linear: PackedLinear | PlainLinear, x: Tensor, residual: Tensor) -> Tensor:
        """A row-wise layer and what it is added to; between the two stands the sum over the ranks."""
        return (
            linear.plus(x, residual)
            if self.shard is None
            else residual + self.shard.sum(linear.forward(x))
        )


def _layer_types(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None)
    kind = (
        "sliding_attention"
        if getattr(config, "sliding_window", None) is not None
        else "full_attention"
    )
    return list(kinds) if kinds is not None else [kind] * config.num_hidden_layers


def _rotary_table(
    rotary: Any, like: Tensor, positions: int
) -> Tensor:  # [positions, 2, 1, head_dim]
    """cos and sin of every position; the first half of sin negative, so that a roll by half a head rotates."""
    cos, sin = rotary(like, torch.arange(positions, device=like.device)[None])
    sin = sin[0].clone()
    sin[:, : sin.shape[1] // 2].neg_()
    return torch.stack([cos[0], sin], dim=1).unsqueeze(2)
