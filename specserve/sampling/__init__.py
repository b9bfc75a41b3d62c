"""Mathematics on tensors: noise, the distribution that is sampled, and the verifiers.

It knows neither models nor rounds.
"""

from __future__ import annotations

from specserve.sampling.distribution import (
    WarpBatch,
    from_sparse_distribution,
    logprobs,
    sample,
    to_sparse_distribution,
    truncate_to_support,
)
from specserve.sampling.drafts import DraftBatch
from specserve.sampling.noise import Purpose, exponential, row_keys, seed_array, uniform
from specserve.sampling.penalties import History
from specserve.sampling.verify import VERIFIERS, RandomStreams, VerifyResult, verify_greedy

__all__ = [
    "VERIFIERS",
    "DraftBatch",
    "History",
    "Purpose",
    "RandomStreams",
    "VerifyResult",
    "WarpBatch",
    "exponential",
    "from_sparse_distribution",
    "logprobs",
    "row_keys",
    "sample",
    "seed_array",
    "to_sparse_distribution",
    "truncate_to_support",
    "uniform",
    "verify_greedy",
]
