"""Draws of draft tokens from rows of logits, without a model."""

from __future__ import annotations

import pytest
import torch

from specserve.drafters.neural.draws import DraftSampler, DrawSpec
from specserve.sampling.distribution import WarpBatch
from specserve.sampling.verify import RandomStreams, draw_next
from specserve.types import Policy, Warp

VOCAB, ROUND, WANTED = 5000, 30, 3
WARPS = (Warp(), Warp(temperature=0.6), Warp(min_p=0.01), Warp(top_k=40), Warp(top_p=0.9))


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("warps", [WARPS, WARPS[3:]], ids=["mixed", "cut"])
def test_a_coupled_draft_draws_what_the_target_would_draw_by_its_logits(
    warps: tuple[Warp, ...], others: int
) -> None:
    verifiers = ["block"] * others + ["coupled"] * len(warps)
    all_warps = (*(Warp() for _ in range(others)), *warps)
    seeds = range(len(verifiers))
    policies = [
        Policy(warp, verifier, seed, 5)
        for warp, verifier, seed in zip(all_warps, verifiers, seeds, strict=True)
    ]
    sampler = DraftSampler(
        [DrawSpec(ROUND, 0, WANTED, policy, None) for policy in policies],
        support=8,
        device=torch.device("cpu"),
    )
    batch = WarpBatch(warps, [1] * len(warps))
    generator = torch.Generator().manual_seed(1)
    is_far = False  # an unlikely token was drawn
    for depth in range(WANTED):
        logits = torch.randn(len(policies), VOCAB, generator=generator)
        tokens = sampler.draw(logits)[others:]
        # Coupled noise has no round: the target reaches the position in one of its own.
        streams = RandomStreams.from_seeds(seeds[others:], [ROUND + depth] * len(warps))
        own = logits[others:]
        assert torch.equal(tokens, draw_next(verifiers[others:], batch, own, streams))
        ranks = (own > own.gather(1, tokens[:, None])).sum(-1)
        is_far |= bool((ranks > 1024).any())
    assert is_far, "no draw needed more than 1,024 tokens"
