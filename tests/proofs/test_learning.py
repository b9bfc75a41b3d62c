"""A draft whose weights are swapped in the middle of texts leaves them the target's own."""

from __future__ import annotations

import pytest

from specserve.types import VERIFIERS, Request, Speculation, Warp
from tests.support import checkpoints
from tests.support.continuations import NOISE, VOCAB, Case, Pairs, sample
from tests.support.engines import GREEDY, RandomPacer
from tests.support.swapped_drafts import SwappingDrafter

SAMPLES = 1500
"""Samples of each case."""
SEED = 1 << 43
CASES = (
    Case("speculative", "ahead", 3),
    Case("block", "ahead", 4),
    Case("coupled", "ahead", 2),
    Case("each", "ahead", None, "mixed"),
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    directory = tmp_path_factory.mktemp("swapped")
    pairs = Pairs(directory)
    drafts = [
        directory / "draft 8",
        checkpoints.perturb(directory / "target", directory / "other", 2 * NOISE),
    ]
    SwappingDrafter.replace_in(pairs.engines["ahead"], drafts, support=3)
    return pairs


def swaps(pairs: Pairs) -> SwappingDrafter:
    drafter = pairs.engines["ahead"].ahead
    assert isinstance(drafter, SwappingDrafter)
    return drafter


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.verifier}-{case.gamma}")
def test_continuations_have_the_targets_distribution_whatever_is_swapped(
    pairs: Pairs, case: Case
) -> None:
    before = swaps(pairs).num_swaps
    result = sample(pairs, case, samples=SAMPLES, first_seed=SEED + CASES.index(case) * SAMPLES)
    assert result.drafted > result.accepted > 0
    assert swaps(pairs).num_swaps > before
    fit = pairs.fit(result)
    assert fit.dof > 30
    assert fit.p_value > 1e-3


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_greedy_texts_are_those_of_plain_decoding(pairs: Pairs, verifier: str) -> None:
    seeded = verifier == "coupled"
    requests = [
        Request(
            tuple((3 * i + j * j) % VOCAB for j in range(5 + i)),
            40 - i,
            GREEDY,
            i,
            seeded=seeded,
            ignore_eos=True,
            speculation=Speculation(verifier=None if seeded else verifier),
        )
        for i in range(8)
    ]
    run = pairs.engines["ahead"].run(
        requests, pacer=RandomPacer(max_gamma=6, seed=1), gamma=None, max_gamma=6
    )
    assert run.texts == pairs.engines["none"].run(requests, gamma=0).texts
    assert run.drafted > run.accepted > 0
    assert swaps(pairs).num_swaps > 3
    assert swaps(pairs).num_recomputed > 3


def test_coupled_texts_are_those_of_plain_decoding(pairs: Pairs) -> None:
    requests = [
        Request((1, 2, 3, i % VOCAB), 30, Warp(), i, seeded=True, ignore_eos=True) for i in range(8)
    ]
    plain = pairs.engines["none"].run(requests, gamma=0).texts
    pacer = RandomPacer(max_gamma=6, seed=2)
    run = pairs.engines["ahead"].run(requests, pacer=pacer, gamma=None, max_gamma=6)
    assert run.texts == plain
