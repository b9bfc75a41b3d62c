"""All layers of a Llama-shaped network in one call of compiled code.

Between operations that are called one by one, Python takes about a tenth of a pass of few rows. The
bits are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specserve.machine_code.vectors import LINE
from specserve.models.attention import Attention, AttentionVariant, Rotation
from specserve.models.cpu.compiled.attention import NO_WINDOW
from specserve.models.cpu.compiled.layers import LAYER, NUM_COUNTERS, PASS
from specserve.models.cpu.compiled.products import MAX_ROWS
from specserve.models.cpu.compiled_attention import CompiledAttention
from specserve.models.cpu.linear_kernels import (
    MAX_SERIAL,
    CompiledKernel,
    row_stride,
    weight_layout,
)
from specserve.models.layers import (
    AnyLinear,
    HeadShape,
    PackedGate,
    PackedLinear,
    PlainGate,
    ScaledLinear,
)
from specserve.models.layout import Layout
from specserve.models.norm import RMSNorm
from specserve.models.shard import Shard

INT_BYTES = 4
Layer: Any = LAYER.structure()
Pass: Any = PASS.structure()


class CompilableLayer(Protocol):
    """A layer that the compiled code may take."""

    heads: HeadShape
    attention: Attention
    variant: AttentionVariant
    qkv: AnyLinear
    norm_mlp: RMSNorm
    gate: PackedGate | PlainGate
    norms_qk: tuple[RMSNorm, RMSNorm] | None

    @property
    def norm_in(self) -> RMSNorm | None:
        """The norm of its input, unless that comes normed."""
        ...

    @property
    def out(self) -> AnyLinear | ScaledLinear: ...

    @property
    def down(self) -> AnyLinear | ScaledLinear: ...

    @property
    def shard(self) -> Shard | None: ...

    @property
    def rotates(self) -> bool: ...


class CompiledLayers:
    """The layers of a network on one rank, with their pages."""

    max_rows = MAX_ROWS

    def __init__(
        self, layers: Sequence[CompilableLayer], keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> None:
        first = layers[0]
        assert isinstance(first.attention, CompiledAttention)
        assert isinstance(first.qkv, PackedLinear)
        assert isinstance(first.qkv.kernel, CompiledKernel)
        assert isinstance(first.out, PackedLinear)
        self._function, self._heads = first.qkv.kernel.functions.layers, first.heads
        self._kept = (layers, keys, values)  # whose memory the addresses are of
        self._layers = (Layer * len(layers))(
            *(_layer(*of_layer) for of_layer in zip(layers, keys, values, strict=True))
        )
        self._hidden, self._inner = first.norm_mlp.width, _packed_gate(first).out_features
        self._inputs, inputs = first.qkv.in_features, first.out.in_features
        self._v_dim = values[0].shape[-1]
        self._eps, self._scaling = first.norm_mlp.eps, first.variant.scaling
        self._page_size = first.attention.page_size
        self._strides = (
            row_stride(self._inputs),
            2 * first.qkv.out_features,
            row_stride(inputs),
            row_stride(self._inner),
        )
        self._num_weights = len(layers) * (
            self._inputs * first.qkv.out_features + self._hidden * (inputs + 3 * self._inner)
        )

    def new_inputs(self, rows: int) -> Tensor:  # [rows, inputs of the first product and more]
        return torch.zeros(rows, self._strides[0] // 2, dtype=torch.bfloat16)

    def forward(
        self, x: Tensor, layout: Layout, rotation: Rotation, normed: Tensor | None = None
    ) -> Tensor:
        """Return what the last layer makes of rows [rows, hidden], which are overwritten.

        So are `normed`, the `new_inputs` of a layer without a norm of its own.
        """
        assert layout.runs is not None
        runs, block_table = layout.runs.runs, layout.runs.block_table
        rows = len(x)
        sizes = [-(-rows * stride // LINE) * LINE for stride in self._strides]
        room = torch.empty(sum(sizes), dtype=torch.uint8)
        places = [room.data_ptr() + sum(sizes[:i]) for i in range(len(sizes))]
        if normed is not None:
            places[0] = normed.data_ptr()
        is_small = rows * self._num_weights <= MAX_SERIAL * len(self._layers)
        threads = 1 if is_small else torch.get_num_threads()
        num_bytes = len(self._layers) * NUM_COUNTERS * LINE
        counters = torch.zeros(num_bytes + threads * INT_BYTES, dtype=torch.uint8)
        heads = self._heads
        normed_stride, _, attended_stride, inner_stride = self._strides
        of_pass = Pass(
            ctypes.addressof(self._layers),
            x.data_ptr(),
            *places,
            layout.slots.data_ptr(),
            runs.data_ptr(),
            block_table.data_ptr(),
            rotation.table.data_ptr(),
            counters.data_ptr(),
            counters.data_ptr() + num_bytes,
            len(self._layers),
            rows,
            len(runs),
            block_table.shape[1],
            self._page_size,
            self._hidden,
            self._inner,
            heads.kv,
            heads.query // heads.kv,
            heads.dim,
            self._v_dim,
            self._inputs,
            normed_stride,
            attended_stride,
            inner_stride,
            self._eps,
            self._scaling,
        )
        self._function(ctypes.addressof(of_pass), threads)
        return x


def can_compile(layers: Sequence[CompilableLayer]) -> bool:
    """Return whether the compiled code takes these layers as they are."""
    return all(
        layer.shard is None
        and layer.rotates
        and isinstance(layer.attention, CompiledAttention)
        and isinstance(layer.gate, PackedGate)
        and all(
            isinstance(linear, PackedLinear)
            and isinstance(linear.kernel, CompiledKernel)
            and linear.in_features % 2 == 0
            for linear in (layer.qkv, layer.out, layer.down)
        )
        for layer in layers
    )


def _layer(layer: CompilableLayer, keys: Tensor, values: Tensor) -> Any:
    norms: Any = (layer.norm_in, *(layer.norms_qk or (None, None)))
    norm_in, *norms_qk = (None if norm is None else norm.weight.data_ptr() for norm in norms)
    out, down = layer.out, layer.down
    assert isinstance(out, PackedLinear)
    assert isinstance(down, PackedLinear)
    return Layer(
        norm_in,
        layer.qkv.weight.data_ptr(),
        _address(layer.qkv.bias),
        *norms_qk,
        keys.data_ptr(),
        values.data_ptr(),
        out.weight.data_ptr(),
        _address(out.bias),
        layer.norm_mlp.weight.data_ptr(),
        _packed_gate(layer).weight.data_ptr(),
        down.weight.data_ptr(),
        _address(down.bias),
        layer.variant.window or NO_WINDOW,
        *(
            number
            for linear in (layer.qkv, out, _packed_gate(layer), down)
            for number in weight_layout(linear.weight, linear.in_features)
        ),
    )


def _packed_gate(layer: CompilableLayer) -> PackedGate:
    assert isinstance(layer.gate, PackedGate)
    return layer.gate


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
