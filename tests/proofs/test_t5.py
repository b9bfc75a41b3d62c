"""Texts of an encoder-decoder have the target's distribution with any drafter.

They are sampled through a whole engine and compared with the exact distribution.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import T5Config

from tests.support.continuations import VOCAB, Case, Pairs, control, is_flagged, sample

SAMPLES = 1000  # of each case
SEED = 1 << 42
PAGES = 2000
PAGE_SIZE = 2  # so small that texts of a few tokens outgrow the pages that admission reserves
LOGIT_DIVISOR = 10.0  # of the target, so that all continuations occur
DISTANCES = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
SIZES: dict[str, Any] = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 4,
    **DISTANCES,
}
TOKENS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "n_positions": 64,
}

CASES = (
    Case("speculative", "top 3", 2),
    Case("block", "full", 3),
    Case("block", "ahead", None),
    Case("coupled", "full", 2),
    Case("each", "7 of 8 ids", None, "mixed"),
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    config_class: Any = T5Config
    config = config_class(
        **SIZES, **TOKENS, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    )
    return Pairs(
        tmp_path_factory.mktemp("proofs"),
        config,
        pages=PAGES,
        page_size=PAGE_SIZE,
        logit_divisor=LOGIT_DIVISOR,
    )


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.verifier}-{case.drafter}-{case.gamma}-{case.warps}"
)
def test_a_verifier_that_accepts_too_much_is_flagged(pairs: Pairs, case: Case) -> None:
    result = control(pairs, case, CASES.index(case), samples=SAMPLES // 2)
    assert is_flagged(pairs, result)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.verifier}-{case.drafter}-{case.gamma}-{case.warps}"
)
def test_continuations_have_the_targets_distribution(pairs: Pairs, case: Case) -> None:
    result = sample(pairs, case, samples=SAMPLES, first_seed=SEED + CASES.index(case) * SAMPLES)
    assert result.preempted > 0
    assert result.drafted > result.accepted > 0
    fit = pairs.fit(result)
    assert fit.dof > 30
    assert not is_flagged(pairs, result)
    if result.acceptance is not None:
        assert abs(result.acceptance.num_standard_errors) < 3
