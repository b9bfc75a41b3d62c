"""How a model is divided among ranks, as data.

These are the library's tensor-parallel plans, and ours for models that it has none for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from specserve.errors import NoShardingPlan


class Units(Enum):
    """The units into which a part of a dimension can be divided."""

    ANY = "any"
    HEADS = "heads"
    KV_HEADS = "kv_heads"


ANY, HEADS, KV_HEADS = Units


@dataclass(frozen=True, slots=True)
class Cut:
    """A dimension, counted from the end, that consists of fused parts.

    A rank holds its share of each part.
    """

    dim: int
    parts: tuple[Units, ...] = (ANY,)


@dataclass(frozen=True, slots=True)
class Style:
    """How a module's weight and bias, or a bare parameter (`weight`), are divided.

    With `sums`, the ranks' outputs add up to the module's, so its bias belongs to rank 0 alone.
    With `gathers`, each rank computes a share of the outputs from all of the ranks' inputs.
    With `once`, a bare parameter belongs to rank 0 alone.
    With `joins`, each rank computes its share of the outputs from all inputs, as a norm over the
    width of all heads does.
    With `members`, the module is a list with a module for each unit, and a rank keeps its own.
    """

    weight: Cut | None = None
    bias: Cut | None = None
    sums: bool = False
    gathers: bool = False
    once: bool = False
    joins: bool = False
    members: Units | None = None


QKV = (HEADS, KV_HEADS, KV_HEADS)
STYLES: Mapping[str, Style] = {
    # The library's. Its others (gathered outputs, sequence parallelism, latent attention) are
    # not supported.
    "colwise": Style(Cut(-2), Cut(-1)),
    "packed_colwise": Style(Cut(-2, (ANY, ANY)), Cut(-1, (ANY, ANY))),
    "rowwise": Style(Cut(-1), sums=True),
    "moe_tp_experts": Style(sums=True),
    "replicated_with_grad_allreduce": Style(),
    "replicate": Style(),
    # Ours.
    "colwise_kv": Style(Cut(-2, (KV_HEADS,)), Cut(-1, (KV_HEADS,))),
    "colwise_qkv": Style(Cut(-2, QKV), Cut(-1, QKV)),
    "transposed_colwise_qkv": Style(Cut(-1, (HEADS, HEADS, HEADS)), Cut(-1, (HEADS, HEADS, HEADS))),
    "transposed_colwise": Style(Cut(-1), Cut(-1)),
    "transposed_rowwise": Style(Cut(-2), sums=True),
    "last": Style(Cut(-1)),
    "second_to_last": Style(Cut(-2)),
    "once": Style(once=True),
    "packed_last": Style(Cut(-1, (ANY, ANY))),
    "joined": Style(joins=True),
    "head_rows": Style(Cut(-2, (HEADS,))),
    "kv_head_rows": Style(Cut(-2, (KV_HEADS,))),
    "head_members": Style(members=HEADS),
    "kv_head_members": Style(members=KV_HEADS),
    "gathered_rowwise": Style(Cut(-2), Cut(-1), gathers=True),
    "transposed_gathered_rowwise": Style(Cut(-1), Cut(-1), gathers=True),
}
GATHERED_STYLES: Mapping[str, str] = {
    "rowwise": "gathered_rowwise",
    "transposed_rowwise": "transposed_gathered_rowwise",
}
"""Styles of layers that would sum over the ranks, and those that gather their inputs instead."""

T5_PARTS = {
    "SelfAttention.q": "colwise",
    "SelfAttention.k": "colwise",
    "SelfAttention.v": "colwise",
    "SelfAttention.o": "rowwise",
    "SelfAttention.relative_attention_bias": "last",  # a column for each head
    "EncDecAttention.q": "colwise",
    "EncDecAttention.k": "colwise",
    "EncDecAttention.v": "colwise",
    "EncDecAttention.o": "rowwise",
    "DenseReluDense.wi": "colwise",
    "DenseReluDense.wi_0": "colwise",
    "DenseReluDense.wi_1": "colwise",
    "DenseReluDense.wo": "rowwise",
}
T5_PLAN = {
    f"{stack}.block.*.layer.*.{part}": style
    for stack in ("encoder", "decoder")
    for part, style in T5_PARTS.items()
}
ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
GATED_MLP = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
FUSED_MLP = {
    "layers.*.mlp.gate_up_proj": "packed_colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
FALCON_PARTS = {
    # Queries lie beside the keys and values that they share, so that any even range of the rows
    # holds whole groups.
    "h.*.self_attention.query_key_value": "colwise",
    "h.*.self_attention.dense": "rowwise",
    "h.*.mlp.dense_h_to_4h": "colwise",
    "h.*.mlp.dense_4h_to_h": "rowwise",
}
LATENT_ATTENTION = {
    # Latents are computed whole on every rank, and keys and values of its own heads from them.
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
SHARED_EXPERTS = {
    "layers.*.mlp.shared_experts.gate_proj": "colwise",
    "layers.*.mlp.shared_experts.up_proj": "colwise",
    "layers.*.mlp.shared_experts.down_proj": "rowwise",
}
EXPERTS = {
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
}
DEEPSEEK = {**LATENT_ATTENTION, **GATED_MLP, **SHARED_EXPERTS, **EXPERTS}
JOINED_NORMS = {
    "layers.*.self_attn.q_norm": "joined",
    "layers.*.self_attn.k_norm": "joined",
}
"""Norms over the width of all heads."""
OWN_PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {  # Conv1D keeps its weight transposed; no plan in the library
        "h.*.attn.c_attn": "transposed_colwise_qkv",
        "h.*.attn.c_proj": "transposed_rowwise",
        "h.*.mlp.c_fc": "transposed_colwise",
        "h.*.mlp.c_proj": "transposed_rowwise",
    },
    # The library's plans of the next ones gather what is fused or what a norm sees whole, or leave
    # norms of heads whole.
    "phi3": {
        "layers.*.self_attn.qkv_proj": "colwise_qkv",
        "layers.*.self_attn.o_proj": "rowwise",
        **FUSED_MLP,
    },
    "cohere": {
        **ATTENTION,
        "layers.*.self_attn.q_norm": "head_rows",
        "layers.*.self_attn.k_norm": "kv_head_rows",
        **GATED_MLP,
    },
    "glm": {**ATTENTION, **FUSED_MLP},
    "glm4": {**ATTENTION, **FUSED_MLP},
    "olmo2": {**ATTENTION, **JOINED_NORMS, **GATED_MLP},
    "olmo3": {**ATTENTION, **JOINED_NORMS, **GATED_MLP},
    "olmoe": {
        **ATTENTION,
        **JOINED_NORMS,
        **EXPERTS,
    },
    "falcon": FALCON_PARTS,  # no plan in the library
    "stablelm": {  # none either
        **ATTENTION,
        "layers.*.self_attn.q_layernorm.norms": "head_members",
        "layers.*.self_attn.k_layernorm.norms": "kv_head_members",
        **GATED_MLP,
    },
    # The library's plans of the next ones divide experts only, or ask for latents in parts.
    "granitemoe": {
        **ATTENTION,
        "layers.*.block_sparse_moe.experts.gate_up_proj": "packed_colwise",
        "layers.*.block_sparse_moe.experts.down_proj": "rowwise",
        "layers.*.block_sparse_moe.experts": "moe_tp_experts",
    },
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "llama4_text": {  # experts are stored transposed
        **ATTENTION,
        "layers.*.feed_forward.gate_proj": "colwise",
        "layers.*.feed_forward.up_proj": "colwise",
        "layers.*.feed_forward.down_proj": "rowwise",
        "layers.*.feed_forward.shared_expert.gate_proj": "colwise",
        "layers.*.feed_forward.shared_expert.up_proj": "colwise",
        "layers.*.feed_forward.shared_expert.down_proj": "rowwise",
        "layers.*.feed_forward.experts.gate_up_proj": "packed_last",
        "layers.*.feed_forward.experts.down_proj": "second_to_last",
        "layers.*.feed_forward.experts": "moe_tp_experts",
    },
    "t5": T5_PLAN,  # none in the library
    "mt5": T5_PLAN,
    # Gate and up columns alternate, so that any even range of them holds pairs; no plan in the
    # library.
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.sinks": "last",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj": "last",
        "layers.*.mlp.experts.gate_up_proj_bias": "last",
        "layers.*.mlp.experts.down_proj": "second_to_last",
        "layers.*.mlp.experts.down_proj_bias": "once",
        "layers.*.mlp.experts": "moe_tp_experts",
    },
}
MULTI_QUERY_FALCON = {**FALCON_PARTS, "h.*.self_attention.query_key_value": "colwise_qkv"}
"""Plan of a Falcon whose one key and value head lies after all queries: each rank holds it."""
QUERY_NAMES = ("q_proj", "q_b_proj", "query_key_value", "qkv_proj", "c_attn", "SelfAttention.q")
"""Modules of which a plan has at least one if it divides attention by heads."""
KV_NAMES = ("k_proj", "v_proj")
INNER_SIZES = (
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "ffn_hidden_size",
    "d_ff",
)


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Numbers of attention heads, in the whole model or on one rank."""

    query: int
    kv: int

    @classmethod
    def from_config(cls, config: Any) -> HeadCounts:
        query = config.num_attention_heads
        if config.model_type == "falcon":
            if config.new_decoder_architecture:
                return cls(query, config.num_kv_heads)
            return cls(query, 1 if _is_multi_query(config) else query)
        if getattr(config, "is_heterogeneous", False):
            return cls(query, max(layer.num_key_value_heads for layer in config.per_layer_config))
        return cls(query, getattr(config, "num_key_value_heads", None) or query)

    def local(self, size: int) -> HeadCounts:
        """Return the counts of one rank of `size`.

        With fewer kv heads than ranks, several ranks hold the same one.
        """
        return HeadCounts(self.query // size, max(1, self.kv // size))


def plan_for(config: Any) -> Mapping[str, str]:
    """Return the style of each divided module or parameter of the base model.

    In the names, `*` stands for a layer's number. Raises NoShardingPlan.
    """
    own = MULTI_QUERY_FALCON if _is_multi_query(config) else OWN_PLANS.get(config.model_type)
    plan = own or getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise NoShardingPlan(
            f"{config.model_type} models have no tensor-parallel plan; "
            "serve them with tensor_parallel 1"
        )
    unknown = sorted({style for style in plan.values() if style not in STYLES})
    if unknown:
        raise NoShardingPlan(
            f"the tensor-parallel plan of {config.model_type} models asks for "
            f"{', '.join(unknown)}, which specserve does not do"
        )
    if not any(pattern.endswith(QUERY_NAMES) for pattern in plan):
        raise NoShardingPlan(
            f"the tensor-parallel plan of {config.model_type} models leaves attention whole, "
            "which specserve does not do"
        )
    return {
        pattern: "colwise_kv" if style == "colwise" and pattern.endswith(KV_NAMES) else style
        for pattern, style in plan.items()
    }


def _is_multi_query(config: Any) -> bool:
    """Return whether a config is that of a Falcon of the first layout, with one kv head."""
    return (
        config.model_type == "falcon" and config.multi_query and not config.new_decoder_architecture
    )


def gathered_plan(config: Any) -> Mapping[str, str]:
    """Return the plan of a model whose bits do not depend on the number of ranks.

    Raises NoShardingPlan for experts, which are divided inside and summed over the ranks.
    """
    plan = plan_for(config)
    if "moe_tp_experts" in plan.values():
        raise NoShardingPlan(
            f"{config.model_type} models have experts, whose sums over the ranks depend on their "
            "number; leave target.degree_invariant out"
        )
    return {pattern: GATHERED_STYLES.get(style, style) for pattern, style in plan.items()}


def require_even_heads(num_heads: int, size: int) -> None:
    """Raise NoShardingPlan unless `size` ranks can have the same number of attention heads."""
    if num_heads % size != 0:
        raise NoShardingPlan(f"{num_heads} attention heads cannot be shared evenly by {size} ranks")


def check_plan(config: Any, size: int) -> None:
    """Raise NoShardingPlan unless `size` ranks can share a model of this config.

    Needs no weights.
    """
    if size == 1:
        return
    if getattr(config, "is_heterogeneous", False):
        raise NoShardingPlan(
            f"layers of {config.model_type} models differ in their numbers of heads, which ranks "
            "cannot share; serve them with tensor_parallel 1"
        )
    plan, heads = plan_for(config), HeadCounts.from_config(config)
    require_even_heads(heads.query, size)
    cuts = [STYLES[style].weight for style in plan.values()]
    can_repeat = size % heads.kv == 0 and any(
        cut is not None and KV_HEADS in cut.parts for cut in cuts
    )
    if heads.kv % size != 0 and not can_repeat:
        raise NoShardingPlan(
            f"{heads.kv} key and value heads can be neither shared evenly by {size} ranks "
            "nor repeated on them"
        )
    for name in INNER_SIZES:
        inner = getattr(config, name, None)
        if isinstance(inner, int) and inner % size != 0:
            raise NoShardingPlan(f"{name} {inner} cannot be shared evenly by {size} ranks")
