"""Layer skipping and heads leave an engine's text the target's own, bit for bit in bf16."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from specserve.config.tree import DEMO
from specserve.features.eagle.heads_drafter import HeadsDrafter
from specserve.features.layer_skip.drafter import LayerSkipDrafter
from specserve.types import VERIFIERS, DraftStep, Policy, Proposal, Request, Speculation, Warp
from tests.support.continuations import (
    CONTROL_LENIENCE,
    COUNTED,
    PLAIN,
    PROMPTS,
    VOCAB,
    Case,
    Group,
    control,
    is_flagged,
    sample,
)
from tests.support.engines import GREEDY, Engine, RandomPacer
from tests.support.self_speculative_engines import (
    SELF_SPECULATIVE,
    WITHOUT_CACHE,
    EagleApartEngine,
    SelfSpeculativeEngine,
    SelfSpeculativePairs,
    random_heads,
    with_heads,
)

SAMPLES, CONTROL_SAMPLES = 750, 500
"""Samples of each case, and of its control."""
SEED = 1 << 42


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> SelfSpeculativePairs:
    return SelfSpeculativePairs(tmp_path_factory.mktemp("self_speculative"))


CASES = (
    Case("speculative", "layer_skip", 2),
    Case("speculative", "heads", 1),
    Case("block", "layer_skip", 4),
    Case("block", "heads", 3),
    Case("block", "top 3 heads", 1),
    Case("coupled", "layer_skip", 3),
    Case("coupled", "heads", 2),
    Case("lenient", "layer_skip", 1),
    Case("each", "layer_skip", None, "mixed"),
    Case("each", "heads", None, "mixed"),
    Case("each", "top 3 heads", None, "truncated"),
    Case("speculative", "eagle", 2),
    Case("coupled", "eagle, 6 of 8 ids", 3),
    Case("each", "eagle, 6 of 8 ids", None, "mixed"),
    Case("speculative", "eagle apart", 2),
    Case("coupled", "eagle apart", 3),
    Case("block", "eagle ahead", 3),
    Case("each", "eagle ahead", None, "mixed"),
    Case("speculative", "eagle block", 3),
    Case("block", "eagle block", 4),
    Case("each", "eagle block", None, "mixed"),
    Case("speculative", "dflash, causal", 3),
    Case("block", "dflash, causal", 4),
    Case("each", "dflash", None, "mixed"),
    Case("each", "dspark", None, "mixed"),
    Case("each", "eagle with copies", None, "mixed"),
)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.verifier}-{case.drafter}-{case.gamma}-{case.warps}"
)
def test_continuations_have_the_targets_distribution_and_measured_alpha_is_the_expected(
    pairs: SelfSpeculativePairs, case: Case
) -> None:
    result = sample(pairs, case, samples=SAMPLES, first_seed=SEED + CASES.index(case) * SAMPLES)
    assert result.drafted > result.accepted > 0
    assert result.preempted > 0
    assert pairs.engines[case.drafter].target.runner.cache.prefix_hits > 0
    fit = pairs.fit(result)
    assert fit.dof > 30
    assert not is_flagged(pairs, result)
    if result.acceptance is not None:
        assert 0.3 < result.acceptance.expected_alpha < 0.95
        assert abs(result.acceptance.num_standard_errors) < 3


@pytest.mark.parametrize("name", ["eagle", "eagle, 6 of 8 ids", "eagle block", "dflash, causal"])
def test_drafts_of_a_whole_engine_are_drawn_from_q_given_all_of_the_targets_states(
    pairs: SelfSpeculativePairs, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the first q of each round with that of the formulas, after a prompt as well."""
    drafter = pairs.engines[name].drafter
    assert drafter is not None
    texts: dict[int, tuple[int, ...]] = {}
    proposed: list[tuple[tuple[int, ...], Proposal]] = []

    def propose(steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        for step in steps:
            before = texts[step.seq_id][: step.start] if step.start else ()
            texts[step.seq_id] = before + step.tokens
        proposals = actual(steps, deadline)
        proposed.extend((texts[each.seq_id], each) for each in proposals if each.tokens)
        return proposals

    actual = drafter.propose
    monkeypatch.setattr(drafter, "propose", propose)
    sample(pairs, Case("speculative", name, 2), samples=30, first_seed=SEED - 30)
    depths = Counter[int]()
    for text, proposal in proposed:
        (prompt,) = (prompt for prompt in PROMPTS if text[: len(prompt)] == prompt)
        depth = len(text) - len(prompt)
        if depth < COUNTED:
            depths[depth] += 1
            written = sum(VOCAB**i * token for i, token in enumerate(text[: -depth - 1 : -1]))
            expected = pairs.q(Group(prompt, PLAIN), name).rows[depth][written]
            assert proposal.q is not None
            ids, probs = proposal.q.ids[0], proposal.q.probs[0]
            np.testing.assert_allclose(probs, expected[ids], atol=1e-4)
    assert depths[1] == 30
    assert depths[2] > 5


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.verifier}-{case.drafter}-{case.gamma}-{case.warps}"
)
def test_a_verifier_that_accepts_too_much_is_flagged(
    pairs: SelfSpeculativePairs, case: Case
) -> None:
    """Accept twice as much, or more where what was prepared by then decides on the drafts."""
    lenience = 3.0 if case.drafter == "eagle ahead" else CONTROL_LENIENCE
    result = control(pairs, case, CASES.index(case), samples=CONTROL_SAMPLES, lenience=lenience)
    assert is_flagged(pairs, result)


def test_a_head_apart_has_prepared_proposals_that_are_taken(pairs: SelfSpeculativePairs) -> None:
    """Otherwise the cases above would say nothing of drafts from a head's own states."""
    engine = pairs.engines["eagle ahead"]
    assert isinstance(engine, EagleApartEngine)
    run = engine.run(requests_for("block", warp=Warp()), gamma=3, max_gamma=4)
    anticipated = [answer.stats.anticipated for answer in run.answers if answer.stats]
    assert sum(anticipated) > len(anticipated)
    assert run.accepted > 0


def requests_for(verifier: str, *, warp: Warp = GREEDY) -> list[Request]:
    prompts = [tuple((3 * i + j * j) % VOCAB for j in range(5 + i)) for i in range(8)]
    seeded = verifier == "coupled"
    speculation = Speculation(verifier=None if seeded else verifier)
    return [
        Request(prompt, 40 - i, warp, i, seeded=seeded, ignore_eos=True, speculation=speculation)
        for i, prompt in enumerate(prompts)
    ]


GREEDY_DRAFTERS = (
    *WITHOUT_CACHE,
    "eagle, 6 of 8 ids",
    "eagle with copies",
    "eagle ahead",
    "dflash",
    "dspark",
)
GREEDY_CASES = [
    (drafter, gamma, VERIFIERS[number % len(VERIFIERS)])
    for number, (drafter, gamma) in enumerate(itertools.product(GREEDY_DRAFTERS, (1, 4, None)))
]
"""Drafters and gammas, with the verifiers in turn: greedy passes ask none of them."""


@pytest.mark.parametrize(("drafter", "gamma", "verifier"), GREEDY_CASES)
def test_greedy_texts_are_those_of_plain_decoding(
    pairs: SelfSpeculativePairs, drafter: str, gamma: int | None, verifier: str
) -> None:
    pacer = RandomPacer(max_gamma=6, seed=1) if gamma is None else None
    run = pairs.engines[drafter].run(requests_for(verifier), pacer=pacer, gamma=gamma, max_gamma=6)
    assert run.texts == pairs.engines["none"].run(requests_for(verifier), gamma=0).texts
    assert run.drafted > run.accepted > 0


@pytest.mark.parametrize("drafter", SELF_SPECULATIVE)
def test_coupled_texts_are_those_of_plain_decoding(
    pairs: SelfSpeculativePairs, drafter: str
) -> None:
    requests = requests_for("coupled", warp=Warp())
    plain = pairs.engines["none"].run(requests, gamma=0).texts
    assert (
        pairs.engines[drafter]
        .run(requests, pacer=RandomPacer(max_gamma=6, seed=2), gamma=None, max_gamma=6)
        .texts
        == plain
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    """Return engines of the demo target in bf16, with so few pages that they preempt."""
    target = DEMO / "target"
    heads = random_heads(
        target,
        tmp_path_factory.mktemp("demo") / "heads",
        hidden_size=256,
        vocab_size=4096,
        spread=0.01,
    )
    return {
        "none": Engine(target, pages=18, dtype="bfloat16"),
        "layer_skip": SelfSpeculativeEngine(
            target,
            lambda model: LayerSkipDrafter(model, (3, 5), support=64),
            pages=18,
            dtype="bfloat16",
        ),
        "heads": SelfSpeculativeEngine(
            target, with_heads(heads, support=64), pages=18, dtype="bfloat16"
        ),
    }


@pytest.mark.parametrize("drafter", ["layer_skip", "heads"])
def test_in_bf16_texts_are_identical_and_prefix_hits_are_the_whole_models(
    demo: dict[str, Engine], drafter: str
) -> None:
    """Run twice; the second prompts continue the first texts.

    Their pages were written between drafts, and the prefix cache finds them.
    """
    prompts = [tuple((17 * i + 31 * j) % 4096 for j in range(20 + 3 * i)) for i in range(6)]
    hits, num_preempted = [], 0
    for _ in range(2):
        requests = [
            Request(prompt, 40, GREEDY, i, ignore_eos=True) for i, prompt in enumerate(prompts)
        ]
        plain = demo["none"].run(requests, gamma=0)
        run = demo[drafter].run(
            requests, pacer=RandomPacer(max_gamma=5, seed=3), gamma=None, max_gamma=5
        )
        assert run.texts == plain.texts
        assert run.drafted > 0
        num_preempted += run.num_preempted
        hits.append(demo[drafter].target.runner.cache.prefix_hits)
        prompts = [prompt + text for prompt, text in zip(prompts[:3], plain.texts, strict=False)]
    assert num_preempted > 0
    assert hits[1] > hits[0]


@pytest.mark.parametrize("drafter", WITHOUT_CACHE)
def test_a_sequence_that_the_target_has_not_cached_gets_no_drafts(
    pairs: SelfSpeculativePairs, drafter: str
) -> None:
    engine = pairs.engines[drafter]
    assert isinstance(engine.drafter, (LayerSkipDrafter, HeadsDrafter))
    (proposal,) = engine.drafter.propose(
        [DraftStep(99, 0, (1, 2, 3), 3, Policy(GREEDY, "block", 1, 3))], math.inf
    )
    assert proposal.tokens == ()
    engine.check_idle()
