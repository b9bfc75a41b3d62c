"""Memory that the largest pass takes beside weights and pages, found by running it on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specserve.errors import TooLittleMemory
from specserve.models.runner import Runner
from specserve.sampling.distribution import WarpBatch
from specserve.sampling.noise import Purpose, row_keys
from specserve.sampling.row_draws import draw_from_rows
from specserve.types import Step, Warp

MOST_EXPENSIVE = Warp(temperature=0.7, top_p=0.9)
"""A warp that needs most memory: its rows are sorted, where nothing finds their threshold."""


@dataclass(frozen=True, slots=True)
class LargestPass:
    """The sizes of a pass: sequences, the rows of each, and how many rows have logits."""

    num_sequences: int
    rows: int
    num_logits: int

    @classmethod
    def from_limits(
        cls, *, max_rows: int, max_sequences: int, max_gamma: int, context: int
    ) -> LargestPass:
        num_sequences = min(max_sequences, max_rows)
        rows = min(-(-max_rows // num_sequences), context)
        return cls(num_sequences, rows, min(max_gamma + 1, rows))

    def num_pages(self, page_size: int) -> int:
        return self.num_sequences * -(-self.rows // page_size)


@torch.inference_mode()
def largest_pass_bytes(runner: Runner, largest: LargestPass) -> int:
    """Run the pass over an empty cache, and sample from its logits; return the bytes that it took.

    Raises TooLittleMemory if it does not fit.
    """
    device, seq_ids = runner.device, range(largest.num_sequences)
    steps = [Step(seq_id, 0, (0,) * largest.rows) for seq_id in seq_ids]
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        logits = runner.run(steps, [largest.num_logits] * largest.num_sequences)
        p = WarpBatch([MOST_EXPENSIVE], [len(logits)]).probabilities(logits)
        places = np.arange(len(p))
        keys = row_keys(range(len(places)), [0], places, Purpose.COUPLED, device=device)
        draw_from_rows(p, keys)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise TooLittleMemory(
            f"a pass of {largest.num_sequences * largest.rows} positions does not fit into the "
            f"memory of {device} beside the weights; lower limits.max_batch_tokens or "
            "limits.max_running, or use more GPUs (target.tensor_parallel)"
        ) from error
    runner.release(seq_ids)
    return torch.cuda.max_memory_allocated(device) - before
