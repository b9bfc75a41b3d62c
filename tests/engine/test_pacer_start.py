"""The pacer in the first ten seconds of an engine, in simulated time, beside every fixed gamma."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from statistics import mean

import pytest

from specserve.engine.batch import Batch, BatchEntry
from specserve.engine.pacer import Pacer
from specserve.types import Proposal, Verdict
from tests.engine.test_pacer import sequence

SECONDS, VERIFY_S = 10.0, 0.018  # a pass of the demo's target, widened to 200M
FIXED = (0, 1, 2, 3, 4, 5, 6, 8, 12)
ROWS = (1, 2, 4, 8, 16, 32)


def tokens_per_second(
    gamma: int | None, *, alpha: float, draft: float, row: float, seed: int
) -> float:
    """Run rounds of one stream that drafts before it verifies.

    A draft pass takes the share `draft` of a verification of one row, each further row `row`. The
    first draft pass takes twenty times as long as the others.
    """
    rng, single = random.Random(seed), sequence()
    pacer = Pacer(
        gamma, max_gamma=16, curve=[(rows, VERIFY_S * (1 + row * (rows - 1))) for rows in ROWS]
    )
    now, tokens, slowness = 0.0, 0, 20.0
    while now < SECONDS:
        (wanted,) = pacer.choose([single])
        accepted = 0
        while accepted < wanted and rng.random() < alpha:
            accepted += 1
        draft_s = (wanted + (slowness - 1 if wanted else 0)) * draft * VERIFY_S * noise(rng)
        slowness = 1.0 if wanted else slowness
        verify_s = VERIFY_S * (1 + row * wanted) * noise(rng)
        proposal = Proposal(1, 3, (5,) * wanted, None, 3) if wanted else None
        entry = BatchEntry(single, 3, needs_verdict=True, gamma=wanted, proposal=proposal)
        batch = Batch([entry])
        pacer.observe(
            batch,
            batch.outcomes([Verdict(1, accepted, 6, None)]),
            draft_seconds=draft_s,
            verify_seconds=verify_s,
        )
        now, tokens = now + draft_s + verify_s, tokens + accepted + 1
    return tokens / now


def noise(rng: random.Random) -> float:
    return rng.uniform(0.9, 1.3)


@pytest.mark.parametrize(
    ("alpha", "draft", "row"), list(product((0.3, 0.45, 0.62, 0.8), (0.1, 0.3, 0.6), (0.02, 0.3)))
)
def test_the_first_ten_seconds_are_as_good_as_those_of_the_best_fixed_gamma(
    alpha: float, draft: float, row: float
) -> None:
    def rate(gamma: int | None, seeds: Sequence[int] = range(3)) -> float:
        return mean(
            tokens_per_second(gamma, alpha=alpha, draft=draft, row=row, seed=seed) for seed in seeds
        )

    assert rate(None) > 0.95 * max(map(rate, FIXED))
