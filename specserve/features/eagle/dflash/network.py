"""The forward pass of a DFlash draft: a block of rows over keys and values of the target's states.

Position i of its KV cache holds keys and values of the target's state after token i, which every
layer computes from the same joined state. A block follows them: the newest token, and masks. Its
rows see all of these, and, where their layer is not causal, all rows of their block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specserve.features.eagle.dflash.config import Sight
from specserve.features.eagle.dflash.weights import MARKOV_FROM, MARKOV_TO, DFlashWeights
from specserve.features.eagle.layer import HeadParts
from specserve.features.eagle.network import UNDRAFTED
from specserve.models.attention import GroupedAttention, Rotation
from specserve.models.cache import PagedCache
from specserve.models.checkpoints.library import llama_rotary
from specserve.models.float8_pages import UNSCALED
from specserve.models.layers import HeadShape, leave_unrounded, make_linear
from specserve.models.layout import AttentionGroup, Layout
from specserve.models.llama import FusedLayer, rotary_table

LOST, KNOWN = 0.0, 1.0
"""The state of a slot: whether it has keys and values of the target's state, or not (yet)."""


@dataclass(frozen=True, slots=True)
class VocabularyEnds:
    """An embedding and a vocabulary head: the target's, or a draft's own."""

    embed: Callable[[Tensor], Tensor]  # [rows] -> [rows, hidden]
    head: Callable[[Tensor], Tensor]  # [rows, hidden] -> [rows, vocabulary]


class ContextProjection:
    """The product that joins the target's states of a position into one, which all layers read."""

    def __init__(self, parts: HeadParts, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._fc, self._norm = make_linear(parts.read("fc.weight")), parts.norm("hidden_norm")

    @torch.inference_mode()
    def __call__(self, taps: Tensor) -> Tensor:  # [rows, taps * target hidden] -> [rows, hidden]
        return self._norm(self._fc.forward(taps.to(self._device, self._dtype)))


class MarkovHead:
    """A product of low rank: of a token, and what it adds to the logits of the next one."""

    def __init__(self, parts: HeadParts) -> None:
        self._states, self._head = parts.read(MARKOV_FROM), make_linear(parts.read(MARKOV_TO))
        leave_unrounded(self._head)

    def __call__(self, tokens: Tensor) -> Tensor:  # [rows] -> [rows, draft vocabulary]
        return self._head.forward(self._states.index_select(0, tokens))


class DFlashNetwork:
    """Layers over a block of rows, the last norm, and the vocabulary head."""

    run_rows = None  # its layers attend in groups, whose masks say what a row sees

    def __init__(
        self,
        weights: DFlashWeights,
        cache: PagedCache,
        *,
        target: VocabularyEnds,
        attention: GroupedAttention,
        context: int,
    ) -> None:
        """Create the network; `target` are the ends that the draft's files do not have."""
        info, config = weights.info, weights.info.layer
        device, dtype = cache.device, cache.states.dtype
        parts = HeadParts(weights, config, device=device, dtype=dtype)
        self._cache, self._sights, self._vocab_size = cache, info.sights, info.vocab_size
        self._heads = HeadShape(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        self.project = ContextProjection(parts, dtype, device)
        names = [f"layers.{index}" for index in range(info.num_layers)]
        self._context = _context_linear(parts, names)
        self._layers = [_layer(parts, name, self._heads, attention) for name in names]
        self._norm = parts.norm("norm")
        self._ends = _ends(parts, target)
        self.markov = MarkovHead(parts) if info.markov_rank else None
        ids = weights.target_ids()
        # The target's ids that the draft knows; None: all.
        self.drafted_ids = None if ids is None else ids.to(device)
        like = torch.empty(0, dtype=dtype, device=device)
        self._rotary = rotary_table(llama_rotary(config).to(device), like, context)

    def write_context(self, states: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Write keys and values of the target's states after these positions: [rows, hidden]."""
        kv, dim = self._heads.kv, self._heads.dim
        both = self._context.forward(states).view(len(states), len(self._layers), 2, kv, dim)
        rotation = Rotation(self._rotary, positions)
        for index, layer in enumerate(self._layers):
            keys, values = both[:, index].unbind(1)
            if layer.norms_qk is not None:
                keys = layer.norms_qk[1](keys.contiguous())
            self._cache.keys[index].index_copy_(0, slots, rotation.apply(keys))
            self._cache.values[index].index_copy_(0, slots, values)

    def logits(self, ids: Tensor, layout: Layout, rows: Tensor | None) -> Tensor:
        x = self._run_layers(ids, layout)
        return self._logits(x if rows is None else x.index_select(0, rows))

    def logits_in_parts(
        self, ids: Tensor, layout: Layout, parts: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        x = self._run_layers(ids, layout)
        for rows in parts:
            yield self._logits(x.index_select(0, rows))

    def to_target(self, logits: Tensor, fill: float) -> Tensor:  # -> [rows, the target's]
        """Return logits of the tokens that the draft knows as logits of all of the target's."""
        if self.drafted_ids is None:
            return logits
        whole = logits.new_full((len(logits), self._vocab_size), fill)
        return whole.index_copy_(1, self.drafted_ids, logits)

    def _run_layers(self, ids: Tensor, layout: Layout) -> Tensor:  # [rows, hidden]
        x = self._ends.embed(ids).to(self._cache.states.dtype)
        rotation = Rotation(self._rotary, layout.positions)
        layouts = {sight: self._seen(layout, sight) for sight in set(self._sights)}
        for layer, sight, keys, values in zip(
            self._layers, self._sights, self._cache.keys, self._cache.values, strict=True
        ):
            x = layer.forward(x, rotation, layouts[sight], keys, values)
        return x

    def _seen(self, layout: Layout, sight: Sight) -> Layout:
        """Return the layout of blocks of rows with the mask of a layer."""
        return replace(
            layout,
            groups=tuple(
                replace(group, relative_bias=self._bias(group, sight)) for group in layout.groups
            ),
        )

    def _bias(self, group: AttentionGroup, sight: Sight) -> Tensor:
        """Return what is added to scores: [seqs, 1, queries, 1, context]."""
        own, keys = group.last_keys, group.pages.keys
        first, last = own.amin(1, keepdim=True), own.amax(1, keepdim=True)  # rows of the block
        hidden = keys > (own if sight.is_causal else last.expand_as(own))[:, :, None]
        lost = self._cache.states[:, 0].index_select(0, group.pages.slots.flatten()) == LOST
        hidden |= (lost.view(len(own), -1) & (keys < first))[:, None]
        if sight.window is not None:
            hidden |= keys <= own[:, :, None] - sight.window
        bias = torch.zeros(hidden.shape, device=hidden.device)
        return bias.masked_fill_(hidden, -torch.inf)[:, None, :, None]

    def _logits(self, x: Tensor) -> Tensor:  # [rows, hidden] -> [rows, the target's vocabulary]
        return self.to_target(self._ends.head(self._norm(x)), UNDRAFTED)


def _context_linear(parts: HeadParts, names: Sequence[str]) -> Any:
    """Return one linear layer for the keys and values of all layers."""
    kinds = [f"{name}.self_attn.{kind}_proj" for name in names for kind in ("k", "v")]
    has_bias = f"{kinds[0]}.bias" in parts.weights
    return make_linear(
        torch.cat([parts.read(f"{kind}.weight") for kind in kinds]),
        torch.cat([parts.read(f"{kind}.bias") for kind in kinds]) if has_bias else None,
    )


def _layer(
    parts: HeadParts, name: str, heads: HeadShape, attention: GroupedAttention
) -> FusedLayer:
    own = parts.linears(f"{name}.self_attn", "q_proj", "k_proj", "v_proj", "o_proj")
    eps = parts.config.rms_norm_eps
    if f"{name}.self_attn.q_norm.weight" in parts.weights:
        for kind in ("q_norm", "k_norm"):
            weight = parts.read(f"{name}.self_attn.{kind}.weight")
            setattr(own, kind, SimpleNamespace(weight=weight, variance_epsilon=eps))
    layer = SimpleNamespace(
        self_attn=own,
        mlp=parts.linears(f"{name}.mlp", "gate_proj", "up_proj", "down_proj"),
        **{
            norm: SimpleNamespace(weight=parts.read(f"{name}.{norm}.weight"), variance_epsilon=eps)
            for norm in ("input_layernorm", "post_attention_layernorm")
        },
    )
    return FusedLayer(
        layer,
        heads,
        window=None,  # the mask has it
        rotates=True,
        scaling=heads.dim**-0.5,
        output_scale=1.0,
        scales=UNSCALED,
        attention=attention,
        shard=None,
    )


def _ends(parts: HeadParts, target: VocabularyEnds) -> VocabularyEnds:
    """Return the embedding and the vocabulary head of a draft's files, or the target's."""
    embed, head = target.embed, target.head
    if "embed_tokens.weight" in parts.weights:
        embed = partial(parts.read("embed_tokens.weight").index_select, 0)
    if "lm_head.weight" in parts.weights:
        linear = make_linear(parts.read("lm_head.weight"))
        leave_unrounded(linear)
        head = linear.forward
    return VocabularyEnds(embed, head)
