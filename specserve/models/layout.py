"""The layout of a pass: its rows' positions, the slots they write, and the groups that attend.

Knows pages and rows; no attention, no cache policy. `planner` makes layouts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of cache and model that a layout depends on."""

    page_size: int
    kv_heads: int
    key_block: int  # keys that one product sums over; contexts are padded to whole blocks
    device: torch.device
    # Rows of a run, where attention reads pages in place; None: it attends in groups.
    run_rows: int | None = None

    def context(self, length: int) -> int:
        return -(-length // self.key_block) * self.key_block

    def num_pages(self, length: int) -> int:
        return -(-self.context(length) // self.page_size)


@dataclass(frozen=True, slots=True)
class Writes:
    """The writes of a pass: `counts[i]` tokens at `starts[i]`, into the pages `block_table[i]`."""

    starts: Ints  # [seqs]
    counts: Ints  # [seqs]
    block_table: Ints  # [seqs, pages] wide enough for the longest context in whole blocks
    context: int | None = None  # every context is padded to this length, for bucketed shapes
    # [seqs] If set, nothing is written: all rows of a sequence see the whole encoder input.
    encoder_lengths: Ints | None = None

    @property
    def lengths(self) -> Ints:  # [seqs]
        """Number of keys that the last row of each sequence sees."""
        return self.starts + self.counts if self.encoder_lengths is None else self.encoder_lengths

    def last_keys(self, positions: Ints) -> Ints:  # both [passes, seqs, queries]
        """Return the last key that rows at these positions see.

        It is their own, or the last of the encoder input.
        """
        return (
            positions
            if self.encoder_lengths is None
            else np.zeros_like(positions) + (self.encoder_lengths[:, None] - 1)
        )


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The pages of a group, as a block table and as attention needs them."""

    block_table: Ints  # [seqs, pages]
    device_block_table: Tensor  # the same on the device, for kernels that read pages in place
    gather: Tensor  # [seqs * kv_heads * context] into a pool seen as [slots * kv_heads, dim]
    slots: Tensor  # [seqs, context] of every position
    keys: Tensor  # [context] 0, 1, ...


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The keys that the queries of one pass, or of several consecutive ones, may see.

    It is computed for all these passes when the first layer asks for it.
    """

    last_keys: Tensor  # [passes, seqs, queries]
    keys: Tensor  # [context]
    cached: dict[int | None, tuple[Tensor, ...]] = field(
        default_factory=dict
    )  # by window; layers share them

    def biases(self, window: int | None) -> tuple[Tensor, ...]:
        """Return what each pass adds to its scores: 0 for a visible key, -inf for any other.

        Each bias is [seqs, 1, queries, 1, context].
        """
        if window not in self.cached:
            last_keys = self.last_keys[:, :, None, :, None, None]
            hidden = self.keys > last_keys
            if window is not None:
                hidden |= self.keys <= last_keys - window
            self.cached[window] = (
                torch.zeros(hidden.shape, device=hidden.device)
                .masked_fill_(hidden, float("-inf"))
                .unbind(0)
            )
        return self.cached[window]


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences that attend in one batched product.

    Each has `queries` rows and `context` keys, padded at the end.
    """

    # [seqs * queries] the row of the pass for each query; padding repeats a row. None: all rows.
    rows: Tensor | None
    valid: Tensor | None  # [n] the queries that are no padding; None: all
    last_keys: Tensor  # [seqs, queries] the last key that each row sees
    pages: GroupPages
    seqs: int
    queries: int
    context: int  # a multiple of the key block
    key_block: int
    is_bucketed: bool  # padded to a shape that recurs
    mask: AttentionMask
    pass_index: int = 0  # of the mask's passes
    # [seqs, kv_heads, queries, 1, context] the bias by relative positions, in place of the mask's
    relative_bias: Tensor | None = None

    def bias(self, window: int | None) -> Tensor:  # [seqs, kv_heads or 1, queries, 1, context]
        """Return what is added to scores: -inf for a hidden key, mostly 0 for others."""
        if self.relative_bias is not None:
            return self.relative_bias
        return self.mask.biases(window)[self.pass_index]


@dataclass(frozen=True, slots=True)
class RunsSize:
    """The sizes that a captured pass of runs is made for: any runs that are no more will do."""

    rows: int
    seqs: int


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of a pass's rows, each of one sequence, for attention that reads pages in place.

    Both tensors lie on the host.
    """

    runs: Tensor  # [n, 4] first row, rows, position of the first, row of the block table
    block_table: Tensor  # [seqs, pages]
    size: RunsSize | None = None  # of the graph that computes the pass, if one does


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of one pass, and the groups or the runs in which they attend."""

    positions: Tensor  # [rows]
    slots: Tensor  # [rows]
    groups: tuple[AttentionGroup, ...]
    # The same rows over the encoder inputs of their sequences, in an encoder-decoder.
    cross_groups: tuple[AttentionGroup, ...] = ()
    runs: Runs | None = None
