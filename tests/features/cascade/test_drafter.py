"""A cascade's proposals: drawn from the q that is sent, reproducible, with the passes of theory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from specserve import theory
from specserve.config.tree import DEMO, config_from_keys
from specserve.drafters.base import NO_TOKEN
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.drafters.neural.draws import top_support
from specserve.drafters.registry import OpenDrafter, open_drafter
from specserve.features.cascade.build import build_stages
from specserve.features.cascade.drafter import CascadeDrafter
from specserve.features.cascade.review import ReviewRequest, _lenient_probs, review
from specserve.features.cascade.sequence import CascadeSequence
from specserve.features.cascade.stages import DraftRequest, PassCounter
from specserve.grammar.sequences import GrammarStates
from specserve.sampling.distribution import WarpBatch
from specserve.types import DraftStep, Policy, Proposal, SparseDistribution, Step, Warp
from tests.drafters.test_anticipation import (
    NEVER,
    WARPS,
    Text,
    anticipating,
    comparable,
    next_or_false,
    texts,
)
from tests.support import checkpoints

PROMPT = (3, 1, 4, 1, 5, 2, 6)
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
PENALISED = Warp(temperature=0.8, top_p=0.9, frequency_penalty=0.5)
NUM_DRAWN = 1000
"""Proposals, each with a seed of its own."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Return two models of 8 ids that agree sometimes, with rather flat q, and one that copies."""
    root = tmp_path_factory.mktemp("stages")
    tokens: dict[str, Any] = {
        "vocab_size": 8,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    large = checkpoints.write(LlamaConfig(**TINY, **tokens), root / "large", seed=3)
    small = checkpoints.perturb(large, root / "small", 0.4)
    return [
        {"path": str(large), "support": 5},
        {"path": str(small), "support": 4},
        {"kind": "max_gram"},
    ]


def opened(
    kind: str,
    stages: Sequence[object],
    *,
    vocab: int = 8,
    pages: int = 4000,
    dtype: str = "float32",
    **keys: object,
) -> OpenDrafter:
    own = {
        "target.path": "t",
        "draft.kind": kind,
        "draft.stages": stages,
        "cache.pages": pages,
        "draft.dtype": dtype,
        "draft.device": "cpu",
    }
    return open_drafter(
        config_from_keys({}, own | {f"draft.{key}": value for key, value in keys.items()}),
        target_vocab_size=vocab,
    )


def cascade(kind: str, stages: Sequence[object], **keys: Any) -> CascadeDrafter:
    drafter = opened(kind, stages, **keys).drafter
    assert isinstance(drafter, CascadeDrafter)
    return drafter


@pytest.mark.parametrize("lenience", [1.0, 1.5, 4.0])
def test_lenient_q_is_the_sum_of_accepted_drafts_and_corrections(lenience: float) -> None:
    """Enumerate in float64: the smaller stage's draft token, its acceptance, the correction."""
    rng = np.random.default_rng(int(lenience))
    q1, q2 = (torch.from_numpy(rng.dirichlet(np.full(7, 0.5), 50)) for _ in range(2))
    difference = (q1 - q2).clamp(min=0)
    residual = difference / difference.sum(-1, keepdim=True)
    accepted = (lenience * q1 / q2).clamp(max=1)
    drawn = q2 * accepted + (q2 * (1 - accepted)).sum(-1, keepdim=True) * residual
    assert torch.allclose(_lenient_probs(q1, q2, difference, lenience), drawn, atol=1e-12, rtol=0)
    if lenience == 1:
        assert torch.allclose(drawn, q1, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("kind", "keys", "warp"),
    [
        ("vertical", {}, PENALISED),
        ("vertical", {"lenience": [2.5, 1.5]}, Warp()),
        ("horizontal", {"k": [[1, 1, 2]]}, PENALISED),
        ("cascade", {"k": [[2, 1, 1], [0, 1, 2], [0, 0, 2]], "lenience": 2.5}, Warp()),
    ],
)
def test_every_token_is_drawn_from_the_row_that_is_sent(
    tiny: list[dict[str, object]], kind: str, keys: dict[str, object], warp: Warp
) -> None:
    """Compare draws with the sent q, given the tokens before.

    Over many seeds the differences are 0 on average, for each position and token.
    """
    steps = [
        DraftStep(seed, 0, PROMPT, 4, Policy(warp, "speculative", seed, len(PROMPT)))
        for seed in range(NUM_DRAWN)
    ]
    excess, variance = np.zeros((4, 8)), np.zeros((4, 8))
    for proposal in cascade(kind, tiny, pages=2 * NUM_DRAWN, **keys).draft(steps, bool):
        assert len(proposal.tokens) == 4
        assert proposal.q is not None
        for position, token in enumerate(proposal.tokens):
            row = np.bincount(
                proposal.q.ids[position], proposal.q.probs[position].astype(float), minlength=8
            )
            assert row.sum() == pytest.approx(1, abs=1e-5)
            excess[position] += np.eye(8)[token] - row
            variance[position] += row * (1 - row)
    errors = excess / np.sqrt(variance + 1e-9)
    assert (variance.max(1) > 10).all(), "nothing was left to chance"
    assert abs(errors).max() < 4


def test_without_lenience_reviewed_tokens_have_the_reviewers_own_distribution(
    tiny: list[dict[str, object]],
) -> None:
    policy = Policy(Warp(), "speculative", 7, len(PROMPT))
    model = cascade("vertical", tiny[:2])
    (proposal,) = model.draft([DraftStep(0, 0, PROMPT, 6, policy)], bool)
    logits = model._first.compute_logits([Step(1, 0, PROMPT + proposal.tokens[:-1])], [6])
    ids, probs = top_support(logits, WarpBatch([policy.warp], [6]), 5, ignores_ids=True)
    assert proposal.q is not None
    np.testing.assert_array_equal(proposal.q.ids, ids.numpy())
    np.testing.assert_allclose(proposal.q.probs, probs.numpy(), atol=1e-5)


def test_tokens_outside_the_reviewers_support_are_never_accepted() -> None:
    """Review with a large lenience: a token outside of the support has probability 0."""
    logits = torch.tensor([[5.0, 4.0, 3.0, -9.0]] * 2)
    for seed in range(50):
        request = ReviewRequest(3, (3,), [None], Policy(Warp(), "speculative", seed, 3))
        (result,) = review(logits, [request], support=3, lenience=1000.0)
        assert result.accepted == 0
        assert result.next_token != 3


STAGES: list[dict[str, object]] = [
    {"path": str(DEMO / "draft")},
    {"path": str(DEMO / "draft"), "support": 8},
    {"kind": "max_gram"},
]
KEYS: dict[str, dict[str, object]] = {
    "vertical": {"lenience": 2},
    "horizontal": {"k": [[2, 1, 2]]},
    "cascade": {},
}


def demo(kind: str) -> CascadeDrafter:
    """Return a cascade in bf16, where a row's bits do not depend on the batch.

    Its smallest stage copies, because a table that learns would depend on the texts before.
    """
    stages = [*STAGES[:2], {"kind": "prompt_copy"}]
    return cascade(kind, stages, vocab=4096, pages=600, dtype="bfloat16", **KEYS[kind])


@pytest.mark.parametrize("kind", KEYS)
def test_a_proposal_does_not_depend_on_how_it_comes_about(kind: str) -> None:
    """Compare fresh proposals with others of the same gamma.

    The others come after rejections, are prepared in advance, interrupted or batched, so that each
    stage has gaps of its own to fill. A stage that reviews asks for no more draft tokens than are
    wanted, so a longer proposal differs from the first review on.
    """
    chance = random.Random(3)
    model = demo(kind)
    ahead, running = anticipating(model, per_position=2), texts(chance, WARPS)
    for number in range(10):
        steps = [
            text.step(chance.choice((0, 5, 5, 5))) for text in running if chance.random() < 0.9
        ]
        ready = ahead.propose(steps, NEVER)
        if number in (4, 9):
            fresh = demo(kind).draft(
                [
                    whole(text, step)
                    for step in steps
                    for text in running
                    if text.seq_id == step.seq_id
                ],
                bool,
            )
            wanted = [
                (one, other)
                for one, other, step in zip(ready, fresh, steps, strict=True)
                if step.gamma
            ]
            assert [comparable(one) for one, _ in wanted] == [
                comparable(other) for _, other in wanted
            ]
        messages = [chance.random() < 0.1 for _ in range(20)]
        ahead.prepare(partial(next_or_false, messages))
        by_id = {text.seq_id: text for text in running}
        for proposal in ready:
            prepared = ahead._branches.prepared.get(proposal.seq_id)
            likely = (
                []
                if prepared is None
                else [
                    token
                    for next_tokens in prepared.forecast.next_tokens
                    for token in map(int, next_tokens[:2])
                    if token != NO_TOKEN
                ]
            )
            by_id[proposal.seq_id].commit(proposal, likely)
    assert ahead.num_hits > 1
    assert ahead.num_misses > 1
    ahead.release([text.seq_id for text in running])
    ahead.prepare(bool)
    assert not model._sequences
    for stage in model._stages[:2]:
        assert isinstance(stage, NeuralDrafter)
        stage.runner.cache.check()
        assert stage.runner.cache.num_used == 0, "branches are left behind"


def whole(text: Text, step: DraftStep) -> DraftStep:
    return replace(step, start=0, tokens=tuple(text.committed))


@pytest.mark.parametrize("kind", KEYS)
def test_an_interrupted_proposal_is_resumed(kind: str) -> None:
    model, other = demo(kind), demo(kind)
    step = DraftStep(0, 0, tuple(range(50, 80)), 8, Policy(Warp(), "block", 5, 30))
    lengths = []
    for _ in range(9):
        (proposal,) = model.draft([step], lambda: True)
        lengths.append(len(proposal.tokens))
    assert lengths[0] in range(1, 8)
    assert lengths == sorted(lengths)
    assert comparable(proposal) == comparable(other.draft([step], bool)[0])
    made = model.passes
    assert comparable(model.draft([step], bool)[0]) == comparable(proposal)
    assert model.passes == made, "what was ready was drafted again"


def test_a_gap_gets_the_number_of_cached_positions(tiny: list[dict[str, object]]) -> None:
    model = cascade("vertical", tiny[:2])
    policy = Policy(Warp(), "block", 1, 4)
    (proposal,) = model.draft([DraftStep(0, 5, (1, 2), 3, policy)], bool)
    assert (proposal.tokens, proposal.start, proposal.num_cached) == ((), 7, 0)


@pytest.mark.parametrize("pages", [1, 2])
def test_where_there_is_no_room_proposals_are_short_and_right(
    tiny: list[dict[str, object]], pages: int
) -> None:
    """Draft for two sequences with pages of 16 positions.

    One of them fits, or both until they grow.
    """
    model = cascade("vertical", tiny[:2], pages=pages)
    for length in (7, 14, 17):
        steps = [
            DraftStep(i, 0, (PROMPT * 3)[:length], 4, Policy(Warp(temperature=0), "block", 1, 7))
            for i in range(2)
        ]
        roomy = cascade("vertical", tiny[:2]).draft(steps, bool)
        for short, full in zip(model.draft(steps, bool), roomy, strict=True):
            assert short.tokens == full.tokens[: len(short.tokens)]


class ScriptedStage:
    """A stage of a made-up model whose every token is 1.

    A draft token is right with probability alpha.
    """

    support = 2

    def __init__(self, alpha: float) -> None:
        self.alpha, self.rng, self.grammar_states = (
            alpha,
            np.random.default_rng(0),
            GrammarStates(None),
        )

    def draft(self, steps: Sequence[DraftStep], should_stop: Callable[[], bool]) -> list[Proposal]:
        drafts = [
            tuple((self.rng.random(step.gamma) < self.alpha).astype(int).tolist()) for step in steps
        ]
        return [
            Proposal(
                step.seq_id,
                step.stop,
                draft,
                None,
                step.stop + len(draft),
            )
            for step, draft in zip(steps, drafts, strict=True)
        ]

    def which_fit(self, steps: Sequence[Step]) -> list[bool]:
        return [True] * len(steps)

    def compute_logits(self, steps: Sequence[Step], wanted: Sequence[int]) -> Tensor:
        return torch.tensor([[0.0, 9.0]]).expand(sum(wanted), 2)

    def history(self, seq_id: int, length: int, policy: Policy) -> None:
        return None


@pytest.mark.parametrize(("alpha", "k"), [(0.5, 2), (0.8, 5)])
def test_tokens_per_review_follow_the_formula(
    monkeypatch: pytest.MonkeyPatch, alpha: float, k: int
) -> None:
    """Compare with 2312.11462.

    By its formula n reviews of k draft tokens bring n (1 - alpha^(k+1)) / (1 - alpha) tokens and
    take n and n k passes.
    """
    monkeypatch.setattr("specserve.features.cascade.build.NeuralDrafter", ScriptedStage)
    counter, gamma = PassCounter(2), 6000
    stages: list[Any] = [ScriptedStage(1.0), ScriptedStage(alpha)]
    node = build_stages(
        "vertical",
        stages,
        k=[[1, 0], [0, k]],
        lenience=[1.0],
        counter=counter,
    )
    sequence = CascadeSequence(0, Policy(Warp(temperature=0), "block", 0, 1), num_stages=2)
    sequence.commit(DraftStep(0, 0, (1,), gamma, sequence.policy))
    node.extend([DraftRequest(sequence, 1, 1 + gamma)], bool)
    assert sequence.tokens == [1] * (1 + gamma)
    reviews, drafts = counter.passes
    assert gamma / reviews == pytest.approx(theory.tokens_per_round(alpha, k), rel=0.03)
    assert drafts == pytest.approx(k * reviews, abs=2 * k)
    swi = theory.standardized_walltime_improvement(gamma + 1, 1, counter.passes, [0.1, 0.01])
    assert swi == pytest.approx((gamma + 1) / (1 + reviews * 0.1 + drafts * 0.01))


def test_lenience_with_a_certain_draft_token_raises_q_of_that_token_only() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0]] * 2)
    q1 = logits[0].softmax(0)
    request = ReviewRequest(
        0,
        (1,),
        [SparseDistribution(np.array([[1]]), np.ones((1, 1), np.float32))],
        Policy(Warp(), "block", 3, 1),
    )
    (result,) = review(logits, [request], support=3, lenience=2.0)
    probs = result.draft_probs[0]
    assert probs is not None
    kept = min(1.0, 2 * float(q1[1]))
    assert dict(zip(probs.ids[0].tolist(), probs.probs[0].tolist(), strict=True))[
        1
    ] == pytest.approx(kept, abs=1e-6)
