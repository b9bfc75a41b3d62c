"""The passes of an EAGLE-3 head of one layer in three calls of compiled code.

A step of few rows otherwise spends more time between small operations than in its products. The
bits are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specserve.features.eagle.compiled_rows import ROWS, compile_rows
from specserve.models.attention import Rotation
from specserve.models.cpu.compiled_layers import CompilableLayer, CompiledLayers
from specserve.models.layout import Layout
from specserve.models.norm import RMSNorm

Rows: Any = ROWS.structure()


class CompiledHead:
    """The layer of a head, with what it reads and leaves in the cache."""

    max_rows = CompiledLayers.max_rows

    def __init__(
        self,
        layer: CompilableLayer,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        *,
        embedding: Tensor,
        norms: tuple[RMSNorm, RMSNorm],  # of a token, and of a state
        page_size: int,
        adds_normed: bool,
        returns_states: bool,
        blocked: float,
    ) -> None:
        self._layers = CompiledLayers([layer], keys, values)
        self._read_rows, self._keep_states = compile_rows()
        hidden, eps = norms[0].width, norms[0].eps
        self._hidden = hidden
        none = torch.zeros(hidden, dtype=torch.bfloat16)
        self._fixed = (embedding, none, *(norm.weight for norm in norms))
        bits = torch.tensor(blocked, dtype=torch.bfloat16).view(torch.int16).item()
        self._page_size = page_size
        self._options = int(adds_normed), int(returns_states), bits, eps

    def forward(self, ids: Tensor, layout: Layout, rotation: Rotation, states: Tensor) -> Tensor:
        """Return the states after rows, [rows, hidden]; `states` keeps them for lack of better."""
        assert layout.runs is not None
        runs, block_table = layout.runs.runs, layout.runs.block_table
        rows = len(ids)
        x = torch.empty(rows, self._hidden, dtype=torch.bfloat16)
        inputs, previous = self._layers.new_inputs(rows), torch.empty_like(layout.slots)
        varied = (ids.contiguous(), layout.slots, runs, block_table, x, inputs, previous, states)
        of_pass = Rows(
            *(tensor.data_ptr() for tensor in (*self._fixed, *varied)),
            rows,
            len(runs),
            block_table.shape[1],
            self._page_size,
            self._hidden,
            2 * states.stride(0),
            2 * inputs.stride(0),
            *self._options,
        )
        place = ctypes.addressof(of_pass)
        self._read_rows(place, 1)
        self._layers.forward(x, layout, rotation, inputs)
        self._keep_states(place, 1)
        return x
