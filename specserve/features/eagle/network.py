"""The forward pass of an EAGLE-3 head: decoder layers over token and hidden state.

Row i is token i with the state after token i - 1, which the target computed or, for a draft token,
the head itself. Its own output is the state after token i until the target's is there. In a
P-EAGLE head (arXiv 2602.01469) a mask token with a learned state stands for a draft token, and the
head's output is no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.features.eagle.checkpoint import EagleWeights
from specserve.features.eagle.layer import (
    BLOCKED,
    MARKS,
    AttendedRows,
    EagleLayer,
    HeadParts,
    padded,
    rounded_if_compiled,
)
from specserve.features.eagle.states import OWN, TARGETS, UNKNOWN, previous_slots
from specserve.models.attention import Attention, Rotation
from specserve.models.cache import PagedCache
from specserve.models.checkpoints.library import llama_rotary
from specserve.models.layers import (
    PackedLinear,
    PlainLinear,
    leave_unrounded,
    make_linear,
)
from specserve.models.layout import Layout
from specserve.models.llama import rotary_table
from specserve.models.norm import RMSNorm

if TYPE_CHECKING:
    from specserve.features.eagle.compiled_head import CompiledHead

UNDRAFTED = -1e4
"""Logit of the target's tokens that the head does not know.

It is finite: where a grammar allows no other tokens, they are drawn.
"""


class EagleProjection:
    """The product that joins three hidden states of the target into one state of the head."""

    def __init__(self, weights: EagleWeights, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._fc = make_linear(rounded_if_compiled(weights.read("fc.weight").to(device, dtype)))
        self._norm = None
        if weights.info.norm_before_fc:
            self._norm = RMSNorm(
                weights.read("input_norm.weight").to(device, dtype), weights.info.layer.rms_norm_eps
            )

    @torch.inference_mode()
    def __call__(self, taps: Tensor) -> Tensor:  # [rows, taps * target hidden] -> [rows, hidden]
        taps = taps.to(self._device, self._dtype)
        return self._fc.forward(taps if self._norm is None else self._norm(taps))


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
        self._head: PackedLinear | PlainLinear = make_linear(
            rounded_if_compiled(parts.read("lm_head.weight"))
        )
        leave_unrounded(self._head)
        ids = weights.target_ids()
        # The target's ids that the head knows; None: all.
        self.drafted_ids = None if ids is None else ids.to(device)
        table = rotary_table(llama_rotary(config).to(device), embedding[:1].to(dtype), context)
        self._rotary = padded(table)
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
