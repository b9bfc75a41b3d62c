"""A decoder layer of an EAGLE-3 head, and how a head's weights are read.

Keys are padded by a score, so that attention never looks at rows without a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.features.eagle.checkpoint import HeadTensors
from specserve.models.attention import Attention, AttentionVariant, Rotation
from specserve.models.checkpoints.rounding import round_to_integers
from specserve.models.coded_weight import CodedWeight
from specserve.models.cpu.linear_kernels import CompiledKernel
from specserve.models.layers import (
    HeadShape,
    can_pack,
    current_weights,
    join_linears,
    take_gate,
    take_linear,
)
from specserve.models.layout import Layout
from specserve.models.norm import RMSNorm

KEY_PADDING = 8
"""Numbers added to each key, half of them after each half, since rotation pairs the halves.

The first is a score for all queries. One would do, but kernels of GPUs take multiples of 8.
"""
BLOCKED = -1e4
"""That score of a key without a state, which no softmax gives any weight beside others."""
MARKS = 32
"""Inputs of the first product beside a row's own: 1, the row's score as a key, and zeros.

By them the product pads queries and keys.
"""
ROUNDED_GROUP = 32
"""Inputs of a matrix that share a scale where it is rounded."""


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
            linear.weight = rounded_if_compiled(linear.weight)
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
        query, kv, width = self.heads.query, self.heads.kv, self.heads.dim
        dim = width - KEY_PADDING
        if self.norms_qk is None:
            qkv = self.qkv.forward(torch.cat([*normed, rows.marks], dim=-1))
            q, k, v = torch.split(qkv, [query * width, kv * width, kv * dim], dim=-1)
            heads = ((q, query), (k, kv), (v, kv))
            q, k, v = (x.view(len(x), num, -1) for x, num in heads)
            return q, k, v
        qkv = self.qkv.forward(torch.cat(list(normed), dim=-1)).view(-1, query + 2 * kv, dim)
        q, k, v = torch.split(qkv, [query, kv, kv], dim=1)
        q, k = padded(self.norms_qk[0](q)), padded(self.norms_qk[1](k))
        q[..., dim // 2], k[..., dim // 2] = 1, rows.marks[:, 1:2]
        return q, k, v


def _pad_heads(linear: Any, heads: int, *, mark: int) -> None:
    """Pad the heads that a linear layer makes, and add the inputs of a row's marks.

    A head's first added number is that mark.
    """
    dim = len(linear.weight) // heads
    weight = padded(linear.weight.unflatten(0, (heads, dim)).mT).mT  # [heads, padded dim, in]
    weight = F.pad(weight, (0, MARKS))
    weight[:, dim // 2, mark - MARKS] = 1
    linear.weight = weight.flatten(0, 1)
    if linear.bias is not None:
        linear.bias = padded(linear.bias.view(heads, dim)).flatten()


def rounded_if_compiled(matrix: Tensor) -> Tensor:
    """Return a matrix rounded to 8 bits if it is the compiled kernel's, and as it is if not.

    A step of one row takes as long as it reads, and half as much drafts as well.
    """
    is_compiled = can_pack(matrix) and isinstance(current_weights().kernel, CompiledKernel)
    if not is_compiled or matrix.dtype != torch.bfloat16 or matrix.shape[1] % ROUNDED_GROUP:
        return matrix
    rounded = round_to_integers(matrix.float(), 8, ROUNDED_GROUP, torch.float16)
    return CodedWeight.from_integers(*rounded)


def padded(x: Tensor) -> Tensor:  # [rows, n, ..., dim] -> [rows, n, ..., dim + KEY_PADDING]
    """Return the halves of the last dimension with zeros after each."""
    halves = F.pad(x.reshape(*x.shape[:-1], 2, -1), (0, KEY_PADDING // 2))
    return halves.flatten(-2)
