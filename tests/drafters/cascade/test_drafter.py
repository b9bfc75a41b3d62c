"""A cascade's proposals: drawn from the rows that are sent, the same however they come about, and as many passes as theory says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve import theory
from specserve.config.tree import DEMO, parse
from specserve.drafters.cascade.build import writer_of
from specserve.drafters.cascade.drafter import Cascade
from specserve.drafters.cascade.review import Guesses, _law, review
from specserve.drafters.cascade.sequence import Manuscript
from specserve.drafters.cascade.stages import Ask, Tally
from specserve.drafters.neural.draws import likeliest
from specserve.drafters.registry import OpenDrafter, open_drafter
from specserve.grammar.sequences import Parses
from specserve.sampling.distribution import WarpBatch
from specserve.types import DraftStep, Policy, Proposal, SparseRows, Step, Warp
from tests.drafters.test_anticipation import NEVER, WARPS, Text, anticipating, as_it_is, texts
from tests.support import checkpoints

PROMPT = (3, 1, 4, 1, 5, 2, 6)
TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
PENALISED = Warp(temperature=0.8, top_p=0.9, frequency_penalty=0.5)
DRAWN = 1000  # proposals, each with a seed of its own


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Two models of 8 ids that agree now and then, with flat enough distributions, and something that copies."""
    root = tmp_path_factory.mktemp("stages")
    tokens = {
        "vocab_size": 8,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    large = checkpoints.write(checkpoints.LlamaConfig(**TINY, **tokens), root / "large", seed=3)
    small = checkpoints.perturbed(large, root / "small", 0.4)
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
        parse({}, own | {f"draft.{key}": value for key, value in keys.items()}),
        target_vocab_size=vocab,
    )


def cascade(kind: str, stages: Sequence[object], **keys: object) -> Cascade:
    drafter = opened(kind, stages, **keys)._drafter  # type: ignore[arg-type]
    assert isinstance(drafter, Cascade)
    return drafter


@pytest.mark.parametrize("lenience", [1.0, 1.5, 4.0])
def test_the_law_is_what_guesses_and_corrections_add_up_to(lenience: float) -> None:
    """By enumeration, in float64: what a smaller stage guesses, whether it stands, what is drawn where it does not."""
    rng = np.random.default_rng(int(lenience))
    q1, q2 = (torch.from_numpy(rng.dirichlet(np.full(7, 0.5), 50)) for _ in range(2))
    left = (q1 - q2).clamp(min=0)
    residual = left / left.sum(-1, keepdim=True)
    stands = (lenience * q1 / q2).clamp(max=1)
    drawn = q2 * stands + (q2 * (1 - stands)).sum(-1, keepdim=True) * residual
    assert torch.allclose(_law(q1, q2, left, lenience), drawn, atol=1e-12, rtol=0)
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
    """Given whatever came before, hits minus what the rows say are 0 on average: for each place and token, over many seeds."""
    steps = [
        DraftStep(seed, 0, PROMPT, 4, Policy(warp, "speculative", seed, len(PROMPT)))
        for seed in range(DRAWN)
    ]
    surprise, variance = np.zeros((4, 8)), np.zeros((4, 8))
    for proposal in cascade(kind, tiny, pages=2 * DRAWN, **keys).draft(steps, bool):
        assert len(proposal.tokens) == 4
        assert proposal.q is not None
        for place, token in enumerate(proposal.tokens):
            row = np.bincount(
                proposal.q.ids[place], proposal.q.probs[place].astype(float), minlength=8
            )
            assert row.sum() == pytest.approx(1, abs=1e-5)
            surprise[place] += np.eye(8)[token] - row
            variance[place] += row * (1 - row)
    errors = surprise / np.sqrt(variance + 1e-9)
    assert (variance.max(1) > 10).all(), "nothing was left to chance"
    assert abs(errors).max() < 4


def test_without_lenience_what_is_reviewed_has_the_reviewers_own_distribution(
    tiny: list[dict[str, object]],
) -> None:
    policy = Policy(Warp(), "speculative", 7, len(PROMPT))
    model = cascade("vertical", tiny[:2])
    (proposal,) = model.draft([DraftStep(0, 0, PROMPT, 6, policy)], bool)
    logits = model._first.read([Step(1, 0, PROMPT + proposal.tokens[:-1])], [6])
    ids, probs = likeliest(logits, WarpBatch([policy.warp], [6]), 5, plain=True)
    assert proposal.q is not None
    np.testing.assert_array_equal(proposal.q.ids, ids.numpy())
    np.testing.assert_allclose(proposal.q.probs, probs.numpy(), atol=1e-5)


def test_what_the_reviewer_would_never_write_never_stands() -> None:
    """Whatever the lenience: a guess outside of its support has probability 0."""
    logits = torch.tensor([[5.0, 4.0, 3.0, -9.0]] * 2)
    for seed in range(50):
        guess = Guesses(3, (3,), [None], Policy(Warp(), "speculative", seed, 3))
        (opinion,) = review(logits, [guess], support=3, lenience=1000.0)
        assert opinion.accepted == 0
        assert opinion.next_token != 3


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


def demo(kind: str) -> Cascade:
    """In bf16, where a row's bits do not depend on its company. The tables stay as they are: what one learns would depend on what it saw."""
    stages = [*STAGES[:2], {"kind": "prompt_copy"}]
    return cascade(kind, stages, vocab=4096, pages=600, dtype="bfloat16", **KEYS[kind])


@pytest.mark.parametrize("kind", KEYS)
def test_a_proposal_is_the_same_however_it_comes_about(kind: str) -> None:
    """Fresh, or behind refusals, prepared in advance, interrupted, in company: each stage has holes of its own to fill.

    For the same gamma: a reviewer asks for no more guesses than are wanted, so a longer proposal is another one from the first review on.
    """
    chance = random.Random(3)
    model = demo(kind)
    ahead, running = anticipating(model, per_stop=2), texts(chance, WARPS)  # type: ignore[arg-type]
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
            assert [as_it_is(one) for one, _ in wanted] == [as_it_is(other) for _, other in wanted]
        looks = [chance.random() < 0.1 for _ in range(20)]
        ahead.prepare(lambda looks=looks: bool(looks) and looks.pop())
        by_id = {text.seq_id: text for text in running}
        for proposal in ready:
            expected = ahead._expected.get(proposal.seq_id)
            likely = (
                []
                if expected is None
                else [token for nexts in expected.outlook.nexts for token in nexts[:2]]
            )
            by_id[proposal.seq_id].take(proposal, likely)
    assert ahead.num_hits > 1
    assert ahead.num_misses > 1
    ahead.release([text.seq_id for text in running])
    ahead.prepare(bool)
    assert not model._scripts
    for stage in model._stages[:2]:
        stage.runner.cache.check()  # type: ignore[attr-defined]
        assert stage.runner.cache.num_used == 0, "branches are left behind"  # type: ignore[attr-defined]


def whole(text: Text, step: DraftStep) -> DraftStep:
    return replace(step, start=0, tokens=tuple(text.committed))


@pytest.mark.parametrize("kind", KEYS)
def test_a_proposal_that_was_begun_is_gone_on_with(kind: str) -> None:
    model, other = demo(kind), demo(kind)
    step = DraftStep(0, 0, tuple(range(50, 80)), 8, Policy(Warp(), "block", 5, 30))
    lengths = []
    for _ in range(9):
        (proposal,) = model.draft([step], lambda: True)
        lengths.append(len(proposal.tokens))
    assert lengths[0] in range(1, 8)
    assert lengths == sorted(lengths)
    assert as_it_is(proposal) == as_it_is(other.draft([step], bool)[0])
    made = model.passes
    assert as_it_is(model.draft([step], bool)[0]) == as_it_is(proposal)
    assert model.passes == made, "what was ready was drafted again"


def test_a_gap_is_answered_by_what_is_held(tiny: list[dict[str, object]]) -> None:
    model = cascade("vertical", tiny[:2])
    policy = Policy(Warp(), "block", 1, 4)
    (proposal,) = model.draft([DraftStep(0, 5, (1, 2), 3, policy)], bool)
    assert (proposal.tokens, proposal.start, proposal.held) == ((), 7, 0)


@pytest.mark.parametrize("pages", [1, 2])
def test_where_there_is_no_room_proposals_are_short_and_right(
    tiny: list[dict[str, object]], pages: int
) -> None:
    """Sixteen positions a page: of two sequences one fits, or both until they grow."""
    model = cascade("vertical", tiny[:2], pages=pages)
    for length in (7, 14, 17):
        steps = [
            DraftStep(i, 0, (PROMPT * 3)[:length], 4, Policy(Warp(temperature=0), "block", 1, 7))
            for i in range(2)
        ]
        roomy = cascade("vertical", tiny[:2]).draft(steps, bool)
        for short, full in zip(model.draft(steps, bool), roomy, strict=True):
            assert short.tokens == full.tokens[: len(short.tokens)]


class Guessing:
    """A stage of a made-up model: every token is 1, and what guesses is right with probability alpha."""

    support = 2

    def __init__(self, alpha: float) -> None:
        self.alpha, self.rng, self.parses = alpha, np.random.default_rng(0), Parses(None)

    def draft(self, steps: Sequence[DraftStep], enough: Callable[[], bool]) -> list[Proposal]:
        guesses = [
            tuple((self.rng.random(step.gamma) < self.alpha).astype(int).tolist()) for step in steps
        ]
        return [
            Proposal(
                step.seq_id,
                step.start + len(step.tokens),
                guess,
                None,
                step.start + len(step.tokens) + len(guess),
            )
            for step, guess in zip(steps, guesses, strict=True)
        ]

    def fitting(self, steps: Sequence[Step]) -> list[bool]:
        return [True] * len(steps)

    def read(self, steps: Sequence[Step], wanted: Sequence[int]) -> Tensor:
        return torch.tensor([[0.0, 9.0]]).expand(sum(wanted), 2)

    def history(self, seq_id: int, length: int, policy: Policy) -> None:
        return None


@pytest.mark.parametrize(("alpha", "k"), [(0.5, 2), (0.8, 5)])
def test_a_reviews_worth_of_tokens_is_that_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, alpha: float, k: int
) -> None:
    """n reviews of k guesses bring n (1 - alpha^(k+1)) / (1 - alpha) tokens and take n and n k passes (2312.11462)."""
    monkeypatch.setattr("specserve.drafters.cascade.build.NeuralDrafter", Guessing)
    tally, gamma = Tally(2), 6000
    writer = writer_of(
        "vertical",
        [Guessing(1.0), Guessing(alpha)],
        asked=[[1, 0], [0, k]],
        lenience=[1.0],
        tally=tally,
    )  # type: ignore[list-item]
    script = Manuscript(0, Policy(Warp(temperature=0), "block", 0, 1), num_stages=2)
    script.commit(DraftStep(0, 0, (1,), gamma, script.policy))
    writer.write([Ask(script, 1, 1 + gamma)], bool)
    assert script.tokens == [1] * (1 + gamma)
    reviews, guesses = tally.passes
    assert gamma / reviews == pytest.approx(theory.tokens_per_round(alpha, k), rel=0.03)
    assert guesses == pytest.approx(k * reviews, abs=2 * k)
    swi = theory.standardized_walltime_improvement(gamma + 1, 1, tally.passes, [0.1, 0.01])
    assert swi == pytest.approx((gamma + 1) / (1 + reviews * 0.1 + guesses * 0.01))


def test_a_law_of_a_certain_guess_is_lenient_with_it_alone() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0]] * 2)
    q1 = logits[0].softmax(0)
    guess = Guesses(
        0,
        (1,),
        [SparseRows(np.array([[1]]), np.ones((1, 1), np.float32))],
        Policy(Warp(), "block", 3, 1),
    )
    (opinion,) = review(logits, [guess], support=3, lenience=2.0)
    law = opinion.laws[0]
    assert law is not None
    kept = min(1.0, 2 * float(q1[1]))
    assert dict(zip(law.ids[0].tolist(), law.probs[0].tolist(), strict=True))[1] == pytest.approx(
        kept, abs=1e-6
    )
