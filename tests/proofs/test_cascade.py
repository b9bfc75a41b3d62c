"""Cascades leave an engine's text the target's own: sampled, greedy and coupled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from specserve.features.cascade import review
from specserve.types import Request, Speculation, Warp
from tests.proofs.distribution import prove
from tests.support.cascade_engines import CASCADES, CascadeEngine, Cascades
from tests.support.continuations import VOCAB, Case, control, is_flagged, sample
from tests.support.engines import GREEDY, RandomPacer

SAMPLES = 600
"""Samples of each case."""
SEED = 1 << 42
NUM_REQUESTS = 5
"""Requests with the same seeds, for each cascade."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Cascades:
    return Cascades(tmp_path_factory.mktemp("cascades"))


CASES = (
    Case("speculative", "vertical", 3),
    Case("block", "vertical", None),
    Case("coupled", "vertical", 3),
    Case("speculative", "vertical, l = 2", 4),
    Case("block", "vertical, l = 2", 4),
    Case("lenient", "vertical, l = 2", None),
    Case("speculative", "vertical on bigrams, l = 8", None),
    Case("each", "vertical on copies", None, "mixed"),
    Case("speculative", "horizontal", 4),
    Case("each", "horizontal", None, "mixed"),
    Case("speculative", "cascade", 4),
    Case("block", "cascade, l = 2 and 1.5", 4),
    Case("each", "cascade, l = 2 and 1.5", None, "mixed"),
    Case("block", "cascade ahead", 3),
    Case("each", "cascade ahead", None, "truncated"),
)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.verifier}-{case.drafter}-{case.gamma}-{case.warps}"
)
def test_continuations_have_the_targets_distribution_and_measured_alpha_is_the_expected(
    pairs: Cascades, case: Case
) -> None:
    (proof,) = prove(pairs, [(1000 + CASES.index(case), case)], SAMPLES)
    result = proof.result
    assert result.preempted > 0
    assert result.drafted > result.accepted > 0
    assert proof.fit.dof > 30
    assert not is_flagged(pairs, result)
    if result.acceptance is not None:
        assert abs(result.acceptance.num_standard_errors) < 3


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.verifier}-{case.drafter}-{case.gamma}-{case.warps}"
)
def test_a_verifier_that_accepts_too_much_is_flagged(pairs: Cascades, case: Case) -> None:
    """Accept three times as much: close as its stages are, twice as much hardly shows."""
    result = control(pairs, case, CASES.index(case), samples=SAMPLES * 2 // 3, lenience=3.0)
    assert is_flagged(pairs, result)


def test_a_q_that_ignores_lenience_is_detected(
    pairs: Cascades, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send the reviewing stage's own distribution although it was lenient: the test must fail."""
    monkeypatch.setattr(review, "_lenient_probs", lambda q1, q2, residual, lenience: q1)
    result = sample(
        pairs,
        Case("speculative", "vertical on bigrams, l = 8", 4),
        samples=2 * SAMPLES,
        first_seed=SEED,
    )
    assert pairs.fit(result).p_value < 1e-6


@pytest.mark.parametrize("way", ["greedy", "coupled"])
def test_the_text_is_the_same_whatever_drafts_and_however_much(pairs: Cascades, way: str) -> None:
    prompts = [tuple((3 * i + j * j) % VOCAB for j in range(5 + i)) for i in range(NUM_REQUESTS)]
    requests = [
        Request(prompt, 30 - len(prompt), GREEDY, seed, ignore_eos=True)
        for seed, prompt in enumerate(prompts)
    ]
    if way == "coupled":
        requests = [
            replace(request, warp=Warp(), seeded=True, speculation=Speculation())
            for request in requests
        ]
    plain = pairs.engines["none"].run(requests, gamma=0).texts
    for name in CASCADES:
        for gamma in (1, 4, None):
            pacer = None if gamma else RandomPacer(max_gamma=6, seed=1)
            run = pairs.engines[name].run(requests, pacer=pacer, gamma=gamma, max_gamma=6)
            assert run.texts == plain, name
            assert run.accepted > 0, name


def test_a_cascade_that_anticipates_has_hits(pairs: Cascades) -> None:
    engine = pairs.engines["cascade ahead"]
    assert isinstance(engine, CascadeEngine)
    assert engine.ahead is not None
    before = engine.ahead.anticipation.num_hits
    engine.run([Request((1, 2, 3), 40, GREEDY, 0, ignore_eos=True)], gamma=3, max_gamma=3)
    assert engine.ahead.anticipation.num_hits > before


def test_every_stage_makes_passes(pairs: Cascades) -> None:
    requests: Sequence[Request] = [
        Request((1, 2, 3, 4), 40, Warp(), seed, ignore_eos=True) for seed in range(4)
    ]
    for name in ("vertical", "horizontal", "cascade"):
        engine = pairs.engines[name]
        assert isinstance(engine, CascadeEngine)
        before = engine.cascade.passes
        engine.run(requests, gamma=4, max_gamma=4)
        made = [now - then for now, then in zip(engine.cascade.passes, before, strict=True)]
        assert all(made), (name, made)
