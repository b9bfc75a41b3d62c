"""Penalties of all rows at once: as cells of what occurred, as counts of whole rows, alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specserve.sampling.penalties import Adjustment, History, PenaltyCells, PenaltyCounts
from specserve.types import Warp

VOCAB = 24


def random_adjustments(*, rows: int | None) -> list[Adjustment]:
    """Return sequences of this number of rows, or of any; other rows lie between some."""
    generator = np.random.default_rng(0)
    adjustments: list[Adjustment] = []
    stop = 0
    for length in generator.integers(1, 30, size=40).tolist():
        num_rows = rows or int(generator.integers(1, 6))
        start = stop + int(generator.integers(0, 2))
        stop = start + num_rows
        text, prompt = generator.integers(0, VOCAB, length), int(generator.integers(0, length + 1))
        num_drafts = num_rows - 1 + int(generator.integers(0, 3))
        drafts = tuple(generator.integers(0, VOCAB, num_drafts).tolist())
        repetition, presence, frequency = generator.choice([0.5, 1.0, 1.3], 3).tolist()
        warp = Warp(
            repetition_penalty=repetition,
            presence_penalty=presence - 1.0,
            frequency_penalty=frequency,
        )
        adjustments.append((start, stop, warp, History(text, prompt, drafts)))
    return adjustments


@pytest.mark.parametrize("num_drawn", [None, 1, 3])
def test_cells_and_counts_have_the_bits_of_each_sequence_alone(num_drawn: int | None) -> None:
    adjustments = random_adjustments(rows=None if num_drawn is None else 1)
    num_rows = adjustments[-1][1] + 1
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, VOCAB, generator=generator)
    drawn = (
        None
        if num_drawn is None
        else torch.randint(0, VOCAB, (num_rows, num_drawn), generator=generator)
    )
    together, counted, alone = (logits.clone() for _ in range(3))
    PenaltyCells(adjustments, together).apply(together, drawn)
    PenaltyCounts(adjustments, counted).apply(counted, drawn)
    for one in adjustments:
        PenaltyCells([one], alone).apply(alone, drawn)
    assert not torch.equal(together, logits)
    assert torch.equal(together, counted)
    assert torch.equal(together, alone)
