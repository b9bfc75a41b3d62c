"""Continuations sampled through the whole engine have the target's distribution.

The long version, with p-values, is docs/measurements/proofs.md. Every draw follows from the
requests' seeds, so these tests give the same figures every time.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from specserve.sampling import verify
from specserve.sampling.drafts import DraftBatch
from specserve.types import VERIFIERS, Warp
from tests.proofs.distribution import (
    CONTROL_FACTOR,
    Proof,
    all_cases,
    cases_to_repeat,
    page,
    pools,
    prove,
)
from tests.support.cascade_engines import CASCADES
from tests.support.chi_square import Fit, ScoreTest
from tests.support.continuations import (
    COUNTED,
    DRAFTERS,
    PROMPTS,
    VOCAB,
    WARPS,
    Case,
    Group,
    Pairs,
    control,
    coupled_texts,
    is_flagged,
    sample,
)
from tests.support.exact_distribution import Floats, agreement, overlap
from tests.support.self_speculative_engines import SELF_SPECULATIVE

SAMPLES, MANY = 750, 1500
"""Samples of each case, and of a single one in depth."""
SEED = 1 << 40


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("proofs"))


CASES = (
    Case("speculative", "top 3", 2),
    Case("speculative", "7 of 8 ids", None, "mixed"),
    Case("block", "top 3", None),
    Case("block", "7 of 8 ids", 2),
    Case("coupled", "full", 2),
    Case("lenient", "7 of 8 ids", 1),
    Case("each", "full", None, "truncated"),
    Case("each", "top 3", None, "mixed"),
    Case("speculative", "ahead", None),
    Case("block", "ahead", 3),
    Case("each", "ahead", None, "mixed"),
    Case("each", "none", 0, "mixed"),
    Case("each", "ahead", None, "ruled"),
    Case("speculative", "other tokens", 2),
    Case("block", "other tokens", None),
    Case("coupled", "other tokens", 2),
    Case("each", "other ahead", None, "mixed"),
)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.verifier}-{case.drafter}-{case.gamma}-{case.warps}"
)
def test_continuations_have_the_targets_distribution(pairs: Pairs, case: Case) -> None:
    (proof,) = prove(pairs, [(1, case)], SAMPLES)
    result = proof.result
    assert result.preempted > 0
    assert pairs.engines[case.drafter].target.runner.cache.prefix_hits > 0
    assert result.drafted > result.accepted > 0 or case.drafter == "none"
    assert proof.fit.dof > 30
    assert not is_flagged(pairs, result)
    if result.acceptance is not None:
        assert abs(result.acceptance.num_standard_errors) < 3


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.gamma != 0],
    ids=lambda case: f"{case.verifier}-{case.drafter}-{case.gamma}-{case.warps}",
)
def test_a_verifier_that_accepts_too_much_is_flagged(pairs: Pairs, case: Case) -> None:
    result = control(pairs, case, CASES.index(case), samples=SAMPLES // 2)
    assert is_flagged(pairs, result)


@pytest.mark.parametrize("verifier", ["speculative", "coupled"])
def test_measured_acceptance_is_what_the_two_models_say(pairs: Pairs, verifier: str) -> None:
    """Compare alpha with E[sum min(p, q)], or the chance that coupled draws agree."""
    acceptance = sample(pairs, Case(verifier, "full", 4), samples=MANY, first_seed=SEED).acceptance
    assert acceptance is not None
    assert 0.3 < acceptance.expected_alpha < 0.9
    assert acceptance.standard_error < 0.01
    assert abs(acceptance.num_standard_errors) < 3


def test_a_coupled_text_is_a_function_of_its_seed_and_the_target(pairs: Pairs) -> None:
    """Draw from the exact p, with noise keyed by seed and position.

    These are the texts of the engine, and texts of many seeds have the exact distribution.
    """
    case = Case("coupled", "top 3", 2)
    result = sample(pairs, case, samples=300, first_seed=SEED)
    fit = Fit()
    for i, group in enumerate(result.counts):
        seeds = SEED + np.arange(i, 300_000, len(result.counts))
        drawn = coupled_texts(pairs, group, seeds)
        assert (
            np.bincount(drawn[: 300 // len(result.counts)], minlength=VOCAB**COUNTED)
            == result.counts[group]
        ).all()
        fit.add(np.bincount(drawn, minlength=VOCAB**COUNTED), pairs.joint(group))
    assert fit.p_value > 1e-3


def test_a_lossy_rule_is_caught(pairs: Pairs) -> None:
    result = sample(pairs, Case("lenient", "full", 4, lenience=2.0), samples=MANY, first_seed=SEED)
    assert pairs.fit(result).p_value < 1e-10


def test_few_samples_distinguish_a_lenience_of_2_from_1(pairs: Pairs) -> None:
    """Check the control itself, which 280 continuations failed when chi-square alone looked."""
    exact, lossy = (Case("lenient", "full", COUNTED, lenience=lenience) for lenience in (1.0, 2.0))
    (right,) = prove(pairs, [(1, exact)], 280)
    (wrong,) = prove(pairs, [(2, lossy)], 280 // CONTROL_FACTOR)
    assert right.holds
    assert right.score.p_value > 1e-3
    assert wrong.result.samples == right.result.samples
    assert wrong.holds
    assert wrong.score.num_standard_errors > 4.5
    assert not replace(wrong, own_fit=wrong.fit, score=right.score).holds


def test_a_lenient_text_has_the_distribution_that_is_enumerated(pairs: Pairs) -> None:
    (proof,) = prove(pairs, [(3, Case("lenient", "full", COUNTED, lenience=2.0))], MANY // 4)
    assert proof.own_fit.dof > 40
    assert proof.own_fit.p_value > 1e-3


@pytest.mark.parametrize("verifier", ["speculative", "block"])
def test_a_correction_drawn_from_p_instead_of_the_residual_is_caught(
    pairs: Pairs, verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole_p(p: Tensor, drafts: DraftBatch, accepted: Tensor, weight: Tensor | None) -> Tensor:
        return p[drafts.rows.gather(1, accepted[:, None])[:, 0]]

    monkeypatch.setattr(verify, "residual", whole_p)
    assert (
        pairs.fit(
            sample(pairs, Case(verifier, "7 of 8 ids", 4), samples=MANY, first_seed=SEED)
        ).p_value
        < 1e-10
    )


def test_the_reference_adds_up(pairs: Pairs) -> None:
    for warps in WARPS.values():
        for warp in warps:
            p = pairs.p(Group(PROMPTS[0], warp))
            assert [len(rows) for rows in p.rows] == [VOCAB**depth for depth in range(COUNTED)]
            assert p.joint().sum() == pytest.approx(1, abs=1e-12)


def test_acceptance_formulas_agree_with_draws() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(5)), np.array([0.5, 0.3, 0.2, 0.0, 0.0])
    noise = rng.gumbel(size=(100_000, 5))
    with np.errstate(divide="ignore"):
        agreed = ((np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1)).mean()
    assert agreement(p[None], q[None])[0] == pytest.approx(agreed, abs=0.005)
    assert overlap(p[None], q[None])[0] == pytest.approx(1 - abs(p - q).sum() / 2)


def test_the_fit_separates_a_right_sample_from_a_wrong_one() -> None:
    rng = np.random.default_rng(0)
    joint = rng.dirichlet(np.full(4096, 0.05))
    assert _p_value(rng.multinomial(20_000, joint), joint) > 0.001
    assert _p_value(rng.multinomial(20_000, 0.9 * joint + 0.1 / 4096), joint) < 1e-10
    p_values = [_p_value(rng.multinomial(2_000, joint), joint) for _ in range(300)]
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.06)


def test_an_impossible_continuation_has_p_value_0() -> None:
    assert _p_value(np.array([50, 49, 1]), np.array([0.5, 0.5, 0.0])) == 0


def _p_value(counts: np.ndarray, joint: Floats) -> float:
    fit = Fit()
    fit.add(counts, joint)
    return fit.p_value


def test_the_long_run_covers_every_verifier_drafter_gamma_and_warp() -> None:
    cases = list(all_cases())
    assert len(set(cases)) == len(cases)
    for verifier in VERIFIERS:
        own = [case for case in cases if case.verifier == verifier and case.is_lossless]
        assert {case.drafter for case in own} == {*DRAFTERS, *CASCADES, *SELF_SPECULATIVE}
        assert {case.gamma for case in own} == {1, 2, 4, None}
        assert {case.warps for case in own} == set(WARPS)
    assert Warp(temperature=0) in WARPS["mixed"]
    assert any(case.gamma == 0 and case.drafter == "none" for case in cases)


def test_the_page_states_sizes_and_p_values(pairs: Pairs) -> None:
    chosen = [
        Case("speculative", "full", 1),
        Case("block", "full", 2),
        Case("coupled", "full", 1),
        Case("lenient", "full", 1),
    ]
    chosen += [Case("each", "none", 0), Case("lenient", "full", 2, lenience=2.0)]
    proofs: list[Proof] = list(prove(pairs, enumerate(chosen), 100))
    pooled = list(pools(proofs))
    text = page(proofs, [], pooled=pooled, jobs=1, seconds=60)
    assert "900 continuations" in text
    assert text.count("\n| speculative |") == 2
    repeated = page(proofs, proofs[:1], pooled=pooled, jobs=1, seconds=60)
    assert repeated.count("\n| speculative |") == 4, "the case and its verifier, again"
    assert f"{proofs[0].fit.p_value:.3f}" in text


def test_an_outlier_is_repeated_alone_or_with_its_verifier(pairs: Pairs) -> None:
    """Call lossy results lossless: one is an outlier, three others are together."""
    lossy = [Case("lenient", "full", gamma, lenience=2.0) for gamma in (1, 2, 3, 4)]
    (right,) = prove(pairs, [(0, Case("block", "full", 2))], 100)
    called = [
        replace(proof, result=replace(proof.result, case=replace(proof.case, lenience=1.0)))
        for proof in prove(pairs, enumerate(lossy, 1), 100)
    ]
    quiet = [replace(proof, fit=Fit(), score=ScoreTest()) for proof in called[1:]]
    alone = [right, replace(called[0], result=right.result), *quiet]
    assert cases_to_repeat(alone, []) == [(6, right.case)]
    together = list(pools([right, *quiet]))
    assert [pool.name for pool in together] == ["block", "lenient"]
    assert cases_to_repeat([right, *quiet], together) == [
        (5, quiet[0].case),
        (6, quiet[1].case),
        (7, quiet[2].case),
    ]
