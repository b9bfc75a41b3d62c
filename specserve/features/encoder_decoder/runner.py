"""Run passes of an encoder-decoder: as for a decoder, and over the encoder inputs besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specserve.features.encoder_decoder.encoder_cache import EncoderCache
from specserve.features.encoder_decoder.t5 import T5Network
from specserve.models.cache import Fork, PagedCache
from specserve.models.layout import Layout, Writes
from specserve.models.runner import Runner
from specserve.types import Step


class EncoderDecoderRunner(Runner):
    """A runner whose sequences each attend to an encoder input, too.

    It is encoded before the first pass over a sequence, and follows the sequence from then on.
    """

    def __init__(self, network: T5Network, cache: PagedCache) -> None:
        super().__init__(network, cache, device=cache.device, sharded_head=network.sharded_head)
        self.encoder_cache = EncoderCache(network, cache, self.planner.geometry)

    def write(
        self, steps: Sequence[Step], num_logits: Sequence[int], num_read: Sequence[int]
    ) -> list[Step]:
        written = super().write(steps, num_logits, num_read)
        self.encoder_cache.encode(written)
        return written

    def release(self, seq_ids: Sequence[int]) -> None:
        super().release(seq_ids)
        for seq_id in seq_ids:
            self.encoder_cache.release(seq_id)

    def fork_many(self, forks: Sequence[Fork]) -> None:
        super().fork_many(forks)
        for fork in forks:
            self.encoder_cache.fork(fork.seq_id, fork.branch_id)

    def promote_branch(self, seq_id: int, branch_id: int) -> None:
        super().promote_branch(seq_id, branch_id)
        self.encoder_cache.promote_branch(seq_id, branch_id)

    def lay_out(self, seq_ids: Sequence[int], writes: Writes, passes: int = 1) -> list[Layout]:
        layouts = super().lay_out(seq_ids, writes, passes)
        cross_groups = self.encoder_cache.cross_groups(seq_ids, writes.counts)
        return [replace(layout, cross_groups=cross_groups) for layout in layouts]
