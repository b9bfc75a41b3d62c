"""The forward pass of an EAGLE-3 head: decoder layers over token and hidden state.

Row i is token i with the state after token i - 1, which the target computed or, for a draft token,
the head itself. Its own output is the state after token i until the target's is there. In a
P-EAGLE head (arXiv 2602.01469) a mask token with a learned state stands for a draft token, and the
head's output is no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.features.eagle.checkpoint import EagleWeights, HeadTensors
from specserve.features.eagle.states import OWN, TARGETS, UNKNOWN, previous_slots
from specserve.models.attention import Attention, AttentionVariant, Rotation
from specserve.models.cache import PagedCache
from specserve.models.checkpoints.library import llama_rotary
from specserve.models.checkpoints.rounding import round_to_integers
from specserve.models.coded_weight import CodedWeight
from specserve.models.layers import (
    HeadShape,
    PackedLinear,
    PlainLinear,
    current_weights,
    join_linears,
    leave_unrounded,
    make_linear,
    take_gate,
    take_linear,
)
from specserve.models.layout import Layout
from specserve.models.llama import rotary_table
from specserve.models.norm import RMSNorm

if TYPE_CHECKING:
    from specserve.features.eagle.compiled_head import CompiledHead

KEY_PADDING = 8
"""Numbers added to each key, half of them after each half, since rotation pairs the halves.

The first is a score for all queries. One would do, but kernels of GPUs take multiples of 8.
"""
MARKS = 32
"""Inputs of the first product beside a row's own: 1, the row's score as a key, and zeros.

By them the product pads queries and keys.
"""
BLOCKED = -1e4
"""That score of a key without a state, which no softmax gives any weight beside others."""
UNDRAFTED = -1e4
"""Logit of the target's tokens that the head does not know.

It is finite: where a grammar allows no other tokens, they are drawn.
"""
ROUNDED_GROUP = 32
"""Inputs of a matrix that share a scale where it is rounded."""


class EagleProjection:
    """The product that joins three hidden states of the target into one state of the head."""

    def __init__(self, weights: EagleWeights, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._fc = make_linear(_small(weights.read("fc.weight").to(device, dtype)))
        self._norm = None
        if weights.info.norm_before_fc:
            self._norm = RMSNorm(
                weights.read("input_norm.weight").to(device, dtype), weights.info.layer.rms_norm_eps
            )

    @torch.inference_mode()
    def __call__(self, taps: Tensor) -> Tensor:  # [rows, taps * target hidden] -> [rows, hidden]
        taps = taps.to(self._device, self._dtype)
        return self._fc.forward(taps if self._norm is None else self._norm(taps))


class HeadParts:
    """Norms and linear layers of a head's weights, on their device."""

    def __init__(
        self, weights: HeadTensors, config: Any, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Read them from `weights`; `config` is the library's of the layers."""
        self.weights, self.config = weights, config
        self._device, self._dtype = device, dtype

    def read(self, name: str) -> Tensor:
        return self.weights.read(name).to(self._device, self._dtype)

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.read(f"{name}.weight"), self.config.rms_norm_eps)

    def linears(self, owner: str, *names: str) -> Any:
        """Return an object with these linear layers, as the library's modules have them."""
        return SimpleNamespace(
            **{
                name: SimpleNamespace(
                    weight=self.read(f"{owner}.{name}.weight"),
                    bias=self.read(bias)
                    if (bias := f"{owner}.{name}.bias") in self.weights
                    else None,
                )
                for name in names
            }
        )


@dataclass(frozen=True, slots=True)
class AttendedRows:
    """The rows of a pass as attention needs them."""

    marks: Tensor  # [rows, MARKS] whose score is 0, or BLOCKED without a state to read
    rotation: Rotation
    layout: Layout


class EagleLayer:
    """Attention and MLP of one decoder layer, whose input comes normed."""

    norm_in, shard, rotates = None, None, True

    def __init__(
        self, parts: HeadParts, name: str, attention: Attention, keys: Tensor, values: Tensor
    ) -> None:
        config, dim = parts.config, parts.config.head_dim
        query, kv = config.num_attention_heads, config.num_key_value_heads
        self.attention, self.keys, self.values = attention, keys, values
        self.heads = HeadShape(query, kv, dim + KEY_PADDING)
        self.variant = AttentionVariant(scaling=dim**-0.5)
        self.norms_qk = (
            (parts.norm(f"{name}.self_attn.q_norm"), parts.norm(f"{name}.self_attn.k_norm"))
            if f"{name}.self_attn.q_norm.weight" in parts.weights
            else None
        )
        own = parts.linears(f"{name}.self_attn", "q_proj", "k_proj", "v_proj", "o_proj")
        if self.norms_qk is None:
            _pad_heads(own.q_proj, query, mark=0)
            _pad_heads(own.k_proj, kv, mark=1)
            own.v_proj.weight = F.pad(own.v_proj.weight, (0, MARKS))
        mlp = parts.linears(f"{name}.mlp", "gate_proj", "up_proj", "down_proj")
        for linear in (*vars(own).values(), *vars(mlp).values()):
            linear.weight = _small(linear.weight)
        self.qkv = join_linears(own, "q_proj", "k_proj", "v_proj")
        self.out = take_linear(own, "o_proj")
        self.gate = take_gate(mlp, "gate_proj", "up_proj")
        self.down = take_linear(mlp, "down_proj")
        self.norm_mlp = parts.norm(f"{name}.post_attention_layernorm")

    def run(self, normed: Sequence[Tensor], residual: Tensor, rows: AttendedRows) -> Tensor:
        """Return the layer's output, [rows, hidden]; the normed input is in parts."""
        x = self.out.add_to_residual(self._attend(normed, rows), residual)
        return self.down.add_to_residual(self.gate.forward(self.norm_mlp(x)), x)

    def _attend(self, normed: Sequence[Tensor], rows: AttendedRows) -> Tensor:
        """Attend to the rows with a state: the score of any other key is far below all others."""
        q, k, v = self._project(normed, rows)
        rotates = self.attention.rotates
        if not rotates:
            q, k = rows.rotation.apply(q), rows.rotation.apply(k)
        out = self.attention.attend(
            rows.layout,
            self.keys,
            self.values,
            q,
            k,
            v,
            self.variant,
            rows.rotation if rotates else None,
        )
        return out.flatten(1)

    def _project(
        self, normed: Sequence[Tensor], rows: AttendedRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return padded queries and keys, and values, each [rows, heads, dim]."""
        query, kv, padded = self.heads.query, self.heads.kv, self.heads.dim
        dim = padded - KEY_PADDING
        if self.norms_qk is None:
            qkv = self.qkv.forward(torch.cat([*normed, rows.marks], dim=-1))
            q, k, v = torch.split(qkv, [query * padded, kv * padded, kv * dim], dim=-1)
            heads = ((q, query, padded), (k, kv, padded), (v, kv, dim))
            q, k, v = (x.view(len(x), num, width) for x, num, width in heads)
            return q, k, v
        qkv = self.qkv.forward(torch.cat([*normed], dim=-1)).view(-1, query + 2 * kv, dim)
        q, k, v = torch.split(qkv, [query, kv, kv], dim=1)
        q, k = _padded(self.norms_qk[0](q)), _padded(self.norms_qk[1](k))
        q[..., dim // 2], k[..., dim // 2] = 1, rows.marks[:, 1:2]
        return q, k, v


class EagleNetwork:
    """Embedding, the layers, the last norm, and the vocabulary head."""

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
        self.run_rows, self._cache = attention.run_rows, cache
        self._embedding, self._vocab_size = embedding, info.vocab_size
        self._norm_before_residual = info.norm_before_residual
        self._returns_states = info.mask_token is None
        parts = HeadParts(weights, config, device=device, dtype=dtype)
        self._layers = [
            EagleLayer(parts, f"layers.{index}", attention, keys, values)
            for index, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True))
        ]
        self._norm_token, self._norm_state = (
            parts.norm("layers.0.input_layernorm"),
            parts.norm("layers.0.hidden_norm"),
        )
        # Deeper layers read one state instead of a token and a state.
        self._norms_deeper = [
            parts.norm(f"layers.{index}.input_layernorm") for index in range(1, info.num_layers)
        ]
        self._norm_head = parts.norm("norm")
        self._head: PackedLinear | PlainLinear = make_linear(_small(parts.read("lm_head.weight")))
        leave_unrounded(self._head)
        ids = weights.target_ids()
        # The target's ids that the head knows; None: all.
        self.drafted_ids = None if ids is None else ids.to(device)
        table = rotary_table(llama_rotary(config).to(device), embedding[:1].to(dtype), context)
        self._rotary = _padded(table)
        self._rotary[:, 0, :, config.head_dim // 2] = 1  # the score stays as it is
        self._compiled = self._compile() if attention.rotates else None

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
        """Run the layers, and keep their outputs as the states after rows without the target's.

        The state after the last row of a sequence is never the target's yet. That after any other
        row is read by the next row of this pass, so it was there before. Outputs that are no states
        leave none, and that of a mask goes with the pass that read it.
        """
        if self._compiled is not None and len(ids) <= self._compiled.max_rows:
            rotation = Rotation(self._rotary, layout.positions)
            return self._compiled.forward(ids, layout, rotation, self._cache.states)
        states, previous = self._cache.states, previous_slots(layout, self._cache.page_size)
        read = states.index_select(0, previous)[:, :-1]  # [rows, hidden]
        known = ~read[:, :1].isnan() & (layout.positions > 0)[:, None]  # [rows, 1]
        tokens = self._embedding.index_select(0, ids).to(states.dtype)
        x = self._run_layers(tokens, read.where(known, 0), known, layout)
        is_last = torch.ones_like(layout.slots, dtype=torch.bool)
        is_last[:-1] = previous[1:] != layout.slots[:-1]
        kept = states.index_select(0, layout.slots)
        is_own = is_last[:, None] | (kept[:, -1:] != TARGETS)
        output = x.where(known, UNKNOWN) if self._returns_states else x.new_full((), UNKNOWN)
        own = F.pad(output.expand_as(x), (0, 1), value=OWN)
        states.index_copy_(0, layout.slots, torch.where(is_own, own, kept))
        return x

    def _compile(self) -> CompiledHead | None:
        """Return the layer as compiled code, if there is one and the code takes it."""
        from specserve.features.eagle.compiled_head import CompiledHead
        from specserve.models.cpu.compiled_layers import can_compile

        layer, cache = self._layers[0], self._cache
        if (
            len(self._layers) > 1
            or layer.norms_qk is not None
            or self._embedding.dtype != cache.states.dtype
            or not can_compile([layer])
        ):
            return None
        return CompiledHead(
            layer,
            cache.keys,
            cache.values,
            embedding=self._embedding,
            norms=(self._norm_token, self._norm_state),
            page_size=cache.page_size,
            adds_normed=self._norm_before_residual,
            returns_states=self._returns_states,
            blocked=BLOCKED,
        )

    def _run_layers(self, tokens: Tensor, states: Tensor, known: Tensor, layout: Layout) -> Tensor:
        normed = self._norm_state(states)
        x = normed if self._norm_before_residual else states
        marks = x.new_zeros(len(x), MARKS)
        marks[:, :1], marks[:, 1:2] = 1, torch.where(known, 0.0, BLOCKED)
        rows = AttendedRows(marks, Rotation(self._rotary, layout.positions), layout)
        first, *deeper = self._layers
        x = first.run((self._norm_token(tokens), normed), x, rows)
        for layer, norm in zip(deeper, self._norms_deeper, strict=True):
            x = layer.run((norm(x),), x, rows)
        return x

    def _logits(self, x: Tensor) -> Tensor:  # [rows, hidden] -> [rows, the target's vocabulary]
        logits = self._head.forward(self._norm_head(x))
        if self.drafted_ids is None:
            return logits
        whole = logits.new_full((len(logits), self._vocab_size), UNDRAFTED)
        return whole.index_copy_(1, self.drafted_ids, logits)


def _pad_heads(linear: Any, heads: int, *, mark: int) -> None:
    """Pad the heads that a linear layer makes, and add the inputs of a row's marks.

    A head's first added number is that mark.
    """
    dim = len(linear.weight) // heads
    weight = _padded(linear.weight.unflatten(0, (heads, dim)).mT).mT  # [heads, padded dim, in]
    weight = F.pad(weight, (0, MARKS))
    weight[:, dim // 2, mark - MARKS] = 1
    linear.weight = weight.flatten(0, 1)
    if linear.bias is not None:
        linear.bias = _padded(linear.bias.view(heads, dim)).flatten()


def _small(matrix: Tensor) -> Tensor:
    """Return a matrix rounded to 8 bits, if the kernel multiplies these as fast as it reads them.

    A step of one row reads half as much then, and drafts as well.
    """
    if current_weights().kernel.name != "compiled" or matrix.dtype != torch.bfloat16:
        return matrix
    if matrix.shape[1] % ROUNDED_GROUP:
        return matrix
    rounded = round_to_integers(matrix.float(), 8, ROUNDED_GROUP, torch.float16)
    return CodedWeight.from_integers(*rounded)


def _padded(x: Tensor) -> Tensor:  # [rows, n, ..., dim] -> [rows, n, ..., dim + KEY_PADDING]
    """Return the halves of the last dimension with zeros after each."""
    halves = F.pad(x.reshape(*x.shape[:-1], 2, -1), (0, KEY_PADDING // 2))
    return halves.flatten(-2)
