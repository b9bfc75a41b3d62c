"""Top-k and top-p of large vocabularies on CPUs: what a sort of all tokens keeps, and draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.sampling import row_draws
from specserve.sampling.distribution import WarpBatch
from specserve.sampling.noise import Purpose
from specserve.sampling.truncation import SELECTED, SORTED_WIDTH, by_selecting, by_sorting
from specserve.sampling.truncation import top_k_top_p as truncate
from specserve.sampling.verify import RandomStreams, draw_next
from specserve.types import Warp

VOCAB = 3 * SORTED_WIDTH
KNOBS = [
    (0, 0.9),
    (0, 1e-9),
    (0, 0.999),
    (1, 1.0),
    (20, 0.8),
    (40, 1.0),
    (SELECTED, 1.0),
    (SELECTED + 1, 0.5),
    (10 * VOCAB, 1.0),
    (10 * VOCAB, 0.7),
]


def logits(kind: str) -> Tensor:
    """Return a row for each of KNOBS, with its maximum at 0."""
    generator = torch.Generator().manual_seed(len(kind))
    x = torch.randn(len(KNOBS), VOCAB, generator=generator)
    match kind:
        case "flat":
            x *= 0.01
        case "peaked":
            x *= 6
        case "tied":
            x = (2 * x).round()
        case "equal":
            x[:] = 0
        case "masked":
            x[torch.rand(x.shape, generator=generator) < 0.99] = -torch.inf
            x[:, 5] = 1
        case _:
            x *= 2
    return x - x.amax(-1, keepdim=True)


def knobs() -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    top_k, top_p = zip(*KNOBS, strict=True)
    return np.array(top_k), np.array(top_p)


KINDS = ("usual", "flat", "peaked", "tied", "equal", "masked")


@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens_are_sorted_and_those_of_a_whole_sort_kept(kind: str) -> None:
    x, expected = logits(kind), by_sorting(logits(kind), *knobs())
    assert torch.equal(by_selecting(x, *knobs()), expected)
    assert torch.equal(truncate(x, *knobs()), expected)
    assert torch.equal(x, logits(kind)), "logits are not changed"


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_truncated_alone_as_among_others(kind: str) -> None:
    x, (top_k, top_p) = logits(kind), knobs()
    together = by_selecting(x, top_k, top_p)
    for row in range(len(x)):
        own = slice(row, row + 1)
        assert torch.equal(by_selecting(x[own], top_k[own], top_p[own]), together[own])


def test_a_row_that_is_not_finite_keeps_nothing_and_harms_no_other() -> None:
    x = logits("usual")
    expected = by_selecting(x, *knobs())
    x[4] = torch.nan
    expected[4] = -torch.inf
    assert torch.equal(by_selecting(x, *knobs()), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_without_draft_tokens_draws_what_whole_rows_draw(kind: str) -> None:
    x = 3 * logits(kind) + 5
    warps = [
        Warp(temperature, top_k, top_p, min_p)
        for (top_k, top_p), temperature, min_p in zip(
            KNOBS, (0.7, 1, 1.5) * 4, (0, 0.1, 0, 0, 0.3) * 2, strict=False
        )
    ]
    batch = WarpBatch(warps, [1] * len(warps))
    found = batch.few_weights(x)
    assert found is not None
    few, weights = found
    whole = batch.probabilities(x, as_weights=np.full(len(x), True))
    assert torch.equal(whole[few.rows, few.ids], torch.from_numpy(few.of_table(weights)))
    assert whole.count_nonzero() == weights.count_nonzero()
    names = ["block", "coupled"] * (len(warps) // 2)
    for seed in range(20):
        streams = RandomStreams.from_seeds([seed] * len(x), range(len(x)))
        keys = [
            streams.keys(Purpose.COUPLED if name == "coupled" else Purpose.NEXT, 1, x.device)[i]
            for i, name in enumerate(names)
        ]
        expected = row_draws.draw_from_rows(whole, torch.cat(keys))
        assert torch.equal(draw_next(names, batch, x, streams), expected)


def test_few_tokens_are_looked_for_where_each_row_has_few() -> None:
    x = logits("usual")[:2]
    cut, whole, greedy = Warp(top_k=9), Warp(), Warp(temperature=0, top_k=9)
    assert WarpBatch([cut, cut], [1, 1]).few_weights(x) is not None
    for other in (whole, greedy):
        assert WarpBatch([cut, other], [1, 1]).few_weights(x) is None
    assert WarpBatch([cut, cut], [1, 1]).few_weights(x[:, :SORTED_WIDTH]) is None
