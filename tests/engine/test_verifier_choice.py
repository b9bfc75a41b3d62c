"""Sampled requests get the verifier that gives more tokens a second, and keep it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from specserve.engine.batch import Batch, BatchEntry
from specserve.engine.sequence import Sequence
from specserve.engine.verifier_choice import VerifierChoice
from specserve.tools.simulate.acceptance_model import AcceptanceConfig
from specserve.types import Policy, Proposal, Request, Verdict, Warp
from tests.support.engines import finish
from tests.support.fakes import FakeDrafter, FakeTarget, VirtualClock, model_info, open_coordinator
from tests.support.verifier_loads import VerifierLoad, run_load

HIDDEN = VerifierLoad(
    {
        "block": AcceptanceConfig(alpha=0.72, ranks=(0.4,)),
        "coupled": AcceptanceConfig(alpha=0.68, ranks=(0.9,)),
    },
    anticipates=True,
    requests=60,
    tokens=96,
    draft_seconds=0.003,
)
"""`coupled` accepts less, and lets the drafter foresee more."""
LOCKSTEP = VerifierLoad(
    {"block": AcceptanceConfig(alpha=0.72), "coupled": AcceptanceConfig(alpha=0.62)},
    anticipates=False,
    requests=60,
    tokens=96,
)


@pytest.mark.parametrize(
    ("load", "better"), [(HIDDEN, "coupled"), (LOCKSTEP, "block")], ids=["hidden", "lockstep"]
)
def test_the_choice_reaches_98_percent_of_the_better_verifier(
    load: VerifierLoad, better: str
) -> None:
    rates = {name: run_load(load, name).rate for name in ("block", "coupled")}
    chosen = run_load(load, None)
    assert max(rates, key=rates.__getitem__) == better
    assert rates[better] > 1.1 * min(rates.values())
    assert chosen.rate > 0.98 * rates[better]
    assert chosen.verifiers.most_common()[0][0] == better


class HitsPay:
    """A model of rates under which prepared proposals are what counts."""

    def expected_rate(
        self, num_sequences: int, *, alpha: float | None = None, hit_rate: float | None = None
    ) -> float:
        assert alpha is not None
        assert hit_rate is not None
        return alpha * (1 + hit_rate)


def sequence(seq_id: int, *, temperature: float = 1.0, is_open: bool = True) -> Sequence:
    warp = Warp(temperature)
    return Sequence(
        seq_id,
        Request((1, 2, 3), 1000, warp, seed=1),
        Policy(warp, "block", 1, 3),
        context=9999,
        draft_limit=9999,
        end_ids=frozenset(),
        is_verifier_open=is_open,
    )


def serve(
    choice: VerifierChoice,
    seq_ids: Iterable[int],
    *,
    hit: str,
    temperature: float = 1.0,
    coupled_accepts: int = 2,
) -> list[str]:
    """Serve one request after the other, whose drafts are prepared under the verifier `hit`.

    Of three draft tokens `block` accepts two.
    """
    chosen = []
    for seq_id in seq_ids:
        served = sequence(seq_id, temperature=temperature)
        choice.assign([served], HitsPay())
        verifier = served.policy.verifier
        for _ in range(30):
            proposal = Proposal(seq_id, 3, (5, 5, 5), None, 3, anticipated=verifier == hit)
            batch = Batch([BatchEntry(served, 3, needs_verdict=True, gamma=3, proposal=proposal)])
            accepted = coupled_accepts if verifier == "coupled" else 2
            choice.observe(batch, batch.outcomes([Verdict(seq_id, accepted, 6, None)]))
        choice.drop([seq_id])
        chosen.append(verifier)
    return chosen


def test_the_slower_verifier_is_tried_rarely_and_at_irregular_intervals() -> None:
    chosen = serve(VerifierChoice(), range(400), hit="block")
    trials = [i for i, verifier in enumerate(chosen) if verifier == "coupled"]
    assert 0 < len(trials) < 0.02 * 400
    early = serve(VerifierChoice(), range(16), hit="neither")
    assert early.count("coupled") in (1, 2, 3)


def test_a_verifier_that_becomes_better_is_found_again() -> None:
    choice = VerifierChoice()
    assert serve(choice, range(200), hit="coupled")[-20:].count("coupled") >= 18
    assert serve(choice, range(200, 1200), hit="block")[-20:].count("block") >= 18


def test_a_verifier_that_was_slower_is_found_to_be_better_now() -> None:
    choice = VerifierChoice()
    slower = serve(choice, range(400), hit="neither", coupled_accepts=1)
    better = serve(choice, range(400, 1200), hit="neither", coupled_accepts=3)
    assert slower[-20:].count("block") >= 18
    assert better[-20:].count("coupled") >= 18


def test_requests_that_draw_otherwise_are_chosen_for_apart() -> None:
    choice = VerifierChoice()
    serve(choice, range(100), hit="coupled")
    cold = serve(choice, range(100, 200), hit="block", temperature=0.3)
    warm = serve(choice, range(200, 220), hit="coupled")
    assert cold[-20:].count("block") >= 18
    assert warm.count("coupled") >= 18


def test_a_sequence_keeps_its_verifier_and_one_that_is_not_open_gets_none() -> None:
    choice = VerifierChoice()
    serve(choice, range(100), hit="coupled")
    kept, fixed = sequence(100), sequence(101, is_open=False)
    choice.assign([kept, fixed], HitsPay())
    before = kept.policy
    serve(choice, range(102, 1102), hit="block")
    choice.assign([kept, fixed], HitsPay())
    assert kept.policy is before
    assert fixed.policy.verifier == "block"


@pytest.mark.parametrize(
    ("temperature", "seeded", "server", "with_draft", "expected"),
    [
        (0.0, False, None, True, {"block"}),
        (1.0, True, None, True, {"coupled"}),
        (1.0, False, "speculative", True, {"speculative"}),
        (1.0, False, None, False, {"block"}),
        (1.0, False, None, True, {"block", "coupled"}),
    ],
    ids=["greedy", "seeded", "the server's own", "no draft", "open"],
)
def test_only_unseeded_sampled_requests_are_chosen_for(
    temperature: float, seeded: bool, server: str | None, with_draft: bool, expected: set[str]
) -> None:
    """Submit all at once: those that wait are chosen for when they start to run."""
    clock, found = VirtualClock(), set[str]()
    info = model_info()
    coordinator = open_coordinator(
        FakeTarget(info, clock=clock, seconds=0.01),
        FakeDrafter(0.7, clock=clock, seconds=0.001) if with_draft else None,
        info=info,
        emit=lambda chunks: found.update(
            chunk.stats.verifier for chunk in chunks if chunk.stats is not None
        ),
        clock=clock,
        max_running=2,
        verifier=server,
    )
    for i in range(40):
        coordinator.submit(Request((1, i), 12, Warp(temperature), seed=i, seeded=seeded))
    asyncio.run(finish(coordinator))
    assert found == expected
