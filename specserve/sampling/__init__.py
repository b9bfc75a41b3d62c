"""Mathematics on tensors: noise, the distribution that is sampled, and the rules that judge drafts. Knows neither models nor rounds."""

from __future__ import annotations

from specserve.sampling.distribution import (
    History,
    WarpBatch,
    from_sparse_rows,
    logprobs,
    sample,
    to_sparse_rows,
    truncate,
)
from specserve.sampling.drafts import Drafts
from specserve.sampling.noise import Purpose, exponential, row_keys, seed_array, uniform
from specserve.sampling.verify import VERIFIERS, Outcome, Streams, agree

__all__ = [
    "VERIFIERS",
    "Drafts",
    "History",
    "Outcome",
    "Purpose",
    "Streams",
    "WarpBatch",
    "agree",
    "exponential",
    "from_sparse_rows",
    "logprobs",
    "row_keys",
    "sample",
    "seed_array",
    "to_sparse_rows",
    "truncate",
    "uniform",
]
