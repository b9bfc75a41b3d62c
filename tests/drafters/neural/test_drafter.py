"""The neural drafter: what it proposes, from what distribution, and what it does when it cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.models.model import ModelOptions, open_model
from specserve.types import DraftStep, Policy, Proposal, Warp
from tests.support import checkpoints

GREEDY, SAMPLED = Warp(temperature=0.0), Warp()
PROMPT = tuple(range(20, 60))
NO_DEADLINE = float("inf")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("neural") / "draft")


def drafter(
    checkpoint: Path,
    *,
    pages: int = 64,
    support: int = 8,
    target_vocab: int = checkpoints.VOCAB,
    context: int = 1024,
) -> NeuralDrafter:
    opened = open_model(checkpoint, ModelOptions(dtype="float32", device="cpu", pages=pages))
    return NeuralDrafter(
        opened.runner,
        vocab_size=opened.spec.vocab_size,
        target_vocab_size=target_vocab,
        context=context,
        support=support,
    )


def policy(
    warp: Warp,
    *,
    seed: int = 1,
    verifier: str = "block",
    prompt: int = len(PROMPT),
    salt: bytes = b"",
) -> Policy:
    return Policy(warp, verifier, seed, prompt, cache_salt=salt)


def step(
    seq_id: int,
    tokens: tuple[int, ...] = PROMPT,
    *,
    start: int = 0,
    gamma: int = 4,
    warp: Warp = GREEDY,
    **options: Any,
) -> DraftStep:
    return DraftStep(seq_id, start, tokens, gamma, policy(warp, **options))


def test_each_sequence_gets_its_own_gamma_and_what_it_would_get_alone(checkpoint: Path) -> None:
    together = drafter(checkpoint).propose(
        [step(i, PROMPT[i:], gamma=i) for i in range(6)], NO_DEADLINE
    )
    alone = [
        drafter(checkpoint).propose([step(i, PROMPT[i:], gamma=i)], NO_DEADLINE)[0]
        for i in range(6)
    ]
    assert [proposal.tokens for proposal in together] == [proposal.tokens for proposal in alone]
    assert [len(proposal.tokens) for proposal in together] == list(range(6))


def test_other_sequences_in_the_batch_change_neither_sampled_tokens_nor_q(
    checkpoint: Path,
) -> None:
    """Vary gamma, and use penalties, which count the draft tokens so far."""
    warps = [
        SAMPLED,
        Warp(frequency_penalty=1.0),
        Warp(temperature=0.5),
        GREEDY,
        Warp(presence_penalty=3.0, temperature=0.0),
        SAMPLED,
    ]
    steps = [
        step(i, PROMPT[i:], gamma=(3 * i) % 7 + 1, warp=warp, seed=i)
        for i, warp in enumerate(warps)
    ]
    together = drafter(checkpoint).propose(steps, NO_DEADLINE)
    for proposal, own in zip(together, steps, strict=True):
        (alone,) = drafter(checkpoint).propose([own], NO_DEADLINE)
        assert (proposal.tokens, proposal.num_cached) == (alone.tokens, alone.num_cached)
        assert len(proposal.tokens) == own.gamma
        assert (proposal.q is None) == (own.policy.warp.temperature == 0)
        if proposal.q is not None and alone.q is not None:
            np.testing.assert_array_equal(np.sort(proposal.q.ids), np.sort(alone.q.ids))
            np.testing.assert_allclose(proposal.q.probs, alone.q.probs, atol=1e-5)


def test_draft_tokens_stay_cached_and_their_pages_are_freed_after_a_rejection(
    checkpoint: Path,
) -> None:
    model = drafter(checkpoint)
    (proposal,) = model.propose([step(0, gamma=20)], NO_DEADLINE)
    assert proposal.num_cached == len(PROMPT) + 19
    (late,) = model.propose(
        [step(0, (7,), start=len(PROMPT), gamma=20)], -1.0
    )  # room for 20, time for one
    assert late.num_cached == len(PROMPT) + 1
    model.propose([step(0, (8,), start=len(PROMPT) + 1, gamma=0)], NO_DEADLINE)
    model.runner.cache.check()
    assert model.runner.cache.num_used == 3


def test_greedy_drafts_are_certain_and_sampled_ones_carry_q(
    checkpoint: Path,
) -> None:
    greedy, sampled = drafter(checkpoint).propose([step(0), step(1, warp=SAMPLED)], NO_DEADLINE)
    assert greedy.q is None
    assert sampled.q is not None
    assert sampled.q.ids.shape == (4, 8)
    assert all(token in row for token, row in zip(sampled.tokens, sampled.q.ids, strict=True))
    np.testing.assert_allclose(sampled.q.probs.sum(1), 1, atol=1e-6)


def test_draws_follow_the_stated_distribution(checkpoint: Path) -> None:
    model = drafter(checkpoint, pages=400)
    proposals: list[Proposal] = []
    for first in range(0, 2000, 100):
        proposals += model.propose(
            [step(seed, gamma=1, warp=SAMPLED, seed=seed) for seed in range(first, first + 100)],
            NO_DEADLINE,
        )
        model.release(range(first, first + 100))
    assert proposals[0].q is not None
    counts = {
        int(token): sum(p.tokens[0] == token for p in proposals) for token in proposals[0].q.ids[0]
    }
    expected = proposals[0].q.probs[0] * len(proposals)
    chi2 = sum(
        (counts[int(token)] - e) ** 2 / e
        for token, e in zip(proposals[0].q.ids[0], expected, strict=True)
    )
    assert sum(counts.values()) == len(proposals)
    assert chi2 < 27  # 7 degrees of freedom: p > 0.0003


def test_coupled_noise_depends_on_the_position_and_not_on_the_round(checkpoint: Path) -> None:
    first = drafter(checkpoint).propose(
        [step(0, warp=SAMPLED, verifier="coupled", gamma=5)], NO_DEADLINE
    )[0]
    later = drafter(checkpoint).propose(
        [step(0, (*PROMPT, *first.tokens[:2]), warp=SAMPLED, verifier="coupled", gamma=3)],
        NO_DEADLINE,
    )[0]
    assert later.tokens == first.tokens[2:]


def test_a_hole_is_filled_by_the_next_step(checkpoint: Path) -> None:
    model = drafter(checkpoint)
    model.propose([step(0, PROMPT[:10])], NO_DEADLINE)
    filled = model.propose([step(0, PROMPT[10:], start=10)], NO_DEADLINE)[0]
    assert filled == drafter(checkpoint).propose([step(0)], NO_DEADLINE)[0]


def test_a_gap_gets_the_number_of_cached_positions(checkpoint: Path) -> None:
    model = drafter(checkpoint)
    proposal = model.propose([step(0, PROMPT[30:], start=30)], NO_DEADLINE)[0]
    assert (proposal.tokens, proposal.num_cached) == ((), 0)


def test_a_prompt_is_found_under_its_own_salt_only(checkpoint: Path) -> None:
    drafting, hits = drafter(checkpoint), []
    for seq_id, salt in enumerate((b"alice", b"bob", b"alice")):
        drafting.propose([step(seq_id, salt=salt)], NO_DEADLINE)
        hits.append(drafting.runner.cache.prefix_hits)
        drafting.runner.cache.check()
    assert hits == [0, 0, 32]


def test_what_does_not_fit_into_the_pages_gets_an_empty_proposal_and_the_others_go_on(
    checkpoint: Path,
) -> None:
    model = drafter(checkpoint, pages=4)  # 64 positions; 40 + 3 are wanted for each
    first, second = model.propose([step(0), step(1)], NO_DEADLINE)
    assert len(first.tokens) == 4
    assert (second.tokens, second.num_cached) == ((), 0)
    model.runner.cache.check()


def test_the_draft_models_context_is_not_exceeded(checkpoint: Path) -> None:
    assert drafter(checkpoint, context=42).propose([step(0, gamma=4)], NO_DEADLINE)[0].tokens == ()


def test_no_token_outside_a_smaller_target_vocabulary_is_proposed(checkpoint: Path) -> None:
    wide = drafter(checkpoint).propose(
        [step(i, PROMPT[i:], gamma=8) for i in range(8)], NO_DEADLINE
    )
    assert max(token for proposal in wide for token in proposal.tokens) >= 150
    narrow = drafter(checkpoint, target_vocab=150).propose(
        [step(i, PROMPT[i:], gamma=8) for i in range(8)], NO_DEADLINE
    )
    assert max(token for proposal in narrow for token in proposal.tokens) < 150


def test_a_larger_target_vocabulary_may_commit_ids_that_the_draft_has_no_row_for(
    checkpoint: Path,
) -> None:
    model = drafter(checkpoint, target_vocab=checkpoints.VOCAB + 64)
    assert (
        len(model.propose([step(0, (*PROMPT, checkpoints.VOCAB + 3))], NO_DEADLINE)[0].tokens) == 4
    )


def test_biases_and_penalties_pass_over_tokens_that_the_draft_has_no_row_for(
    checkpoint: Path,
) -> None:
    model, beyond = drafter(checkpoint, target_vocab=checkpoints.VOCAB + 64), checkpoints.VOCAB + 3
    own = Warp(temperature=0.0, logit_bias=((7, 100.0),), frequency_penalty=0.5)
    both = replace(own, logit_bias=((beyond, 100.0), (7, 100.0)))
    prompt = (*PROMPT, beyond)
    proposals = model.propose([step(0, prompt, warp=own), step(1, prompt, warp=both)], NO_DEADLINE)
    assert proposals[0].tokens == proposals[1].tokens
    assert proposals[0].tokens[0] == 7


def test_past_the_deadline_a_shorter_proposal_is_returned(checkpoint: Path) -> None:
    model = drafter(checkpoint)
    assert len(model.propose([step(0, gamma=8)], -1.0)[0].tokens) == 1


def test_penalties_count_the_drafts_of_the_same_round(checkpoint: Path) -> None:
    rare = Warp(temperature=0.0, frequency_penalty=2.0, repetition_penalty=100.0)
    tokens = drafter(checkpoint).propose([step(0, gamma=16, warp=rare)], NO_DEADLINE)[0].tokens
    assert len(set(tokens)) == len(tokens)
