"""The pacer drafts as much as pays by its own measurements, or as a request asks for."""

from __future__ import annotations

import pytest

from specserve.engine.batch import Batch, BatchEntry
from specserve.engine.pacer import Pacer
from specserve.engine.sequence import Sequence
from specserve.types import Policy, Proposal, Request, Speculation, Verdict, Warp


def sequence(gamma: int | None = None) -> Sequence:
    request = Request((1, 2, 3), 1000, Warp(), seed=1, speculation=Speculation(gamma=gamma))
    return Sequence(
        1,
        request,
        Policy(Warp(), "block", 1, 3),
        context=9999,
        draft_limit=9999,
        end_ids=frozenset(),
    )


def feed(pacer: Pacer, *, accepted: float, pass_seconds: float, rounds: int = 300) -> list[int]:
    """Run rounds in which a fixed share of gamma is accepted, and return the gammas chosen.

    A verification takes 10 ms.
    """
    gammas, due = [], 0.0  # accepted drafts due
    for _ in range(rounds):
        (gamma,) = pacer.choose([sequence()])
        due += accepted * gamma
        num_accepted = min(gamma, int(due))
        due -= num_accepted
        proposal = Proposal(1, 3, (5,) * gamma, None, 3) if gamma else None
        batch = Batch(
            [BatchEntry(sequence(), 3, needs_verdict=True, gamma=gamma, proposal=proposal)]
        )
        pacer.observe(
            batch,
            batch.outcomes([Verdict(1, num_accepted, 6, None)]),
            draft_seconds=gamma * pass_seconds,
            verify_seconds=0.010,
        )
        gammas.append(gamma)
    return gammas


def test_a_requests_own_gamma_wins_over_the_servers_even_when_it_is_0() -> None:
    sequences = [sequence(None), sequence(0), sequence(9)]
    assert Pacer(5, max_gamma=16).choose(sequences) == [5, 0, 9]
    assert Pacer(0, max_gamma=16).choose(sequences) == [0, 0, 9]
    assert Pacer(None, max_gamma=16).choose(sequences)[1:] == [0, 9]


def test_a_fixed_gamma_is_not_changed_by_what_is_measured() -> None:
    assert set(feed(Pacer(3, max_gamma=16), accepted=0.0, pass_seconds=1.0)) == {3}


def test_it_drafts_before_anything_is_measured() -> None:
    assert Pacer(None, max_gamma=16).choose([sequence()])[0] > 0


def test_a_cheap_and_good_draft_gets_the_largest_gamma() -> None:
    assert feed(Pacer(None, max_gamma=8), accepted=1.0, pass_seconds=0.0001)[-1] == 8


def test_an_expensive_draft_gets_a_smaller_gamma_than_a_cheap_one() -> None:
    cheap = feed(Pacer(None, max_gamma=16), accepted=0.6, pass_seconds=0.0005)[-1]
    dear = feed(Pacer(None, max_gamma=16), accepted=0.6, pass_seconds=0.003)[-1]
    assert 0 < dear < cheap


def test_drafts_that_take_no_time_get_the_largest_gamma() -> None:
    assert feed(Pacer(None, max_gamma=8), accepted=1.0, pass_seconds=0.0)[-1] == 8


def test_one_slow_first_pass_does_not_stop_drafting_that_pays() -> None:
    pacer = Pacer(None, max_gamma=8)
    feed(pacer, accepted=1.0, pass_seconds=0.1, rounds=1)  # memory is touched, kernels are made
    assert min(feed(pacer, accepted=1.0, pass_seconds=0.0005, rounds=100)[24:]) > 1


def test_drafting_that_does_not_pay_stops_except_for_short_trials() -> None:
    gammas = feed(Pacer(None, max_gamma=16), accepted=0.0, pass_seconds=0.005, rounds=640)
    assert gammas[-128:].count(0) >= 112
    assert set(gammas[64:]) == {0, 1}
    assert gammas[320:].count(1) < gammas[64:320].count(1), "trials become rarer"


@pytest.mark.parametrize(("plain_seconds", "is_plain"), [(0.005, True), (0.015, False)])
def test_plain_rounds_that_hide_the_host_are_compared_by_whole_rounds(
    plain_seconds: float, is_plain: bool
) -> None:
    """Two of three draft tokens pass: a round with drafts writes 3 tokens in 20 ms."""
    pacer = Pacer(None, max_gamma=3, curve=((1, 0.010), (4, 0.010)), runs_ahead=True)
    gammas = []
    for _ in range(400):
        (gamma,) = pacer.choose([sequence()])
        proposal = Proposal(1, 3, (5,) * gamma, None, 3) if gamma else None
        batch = Batch(
            [BatchEntry(sequence(), 3, needs_verdict=True, gamma=gamma, proposal=proposal)]
        )
        pacer.observe(
            batch,
            batch.outcomes([Verdict(1, min(2, gamma), 6, None)]),
            draft_seconds=0.001 * gamma,
            verify_seconds=0.010 if gamma else 0.001,
            round_seconds=0.017 + 0.001 * gamma if gamma else plain_seconds,
        )
        gammas.append(gamma)
    assert not any(gammas[:3]), "plain rounds are seen first"
    assert (gammas[200:].count(0) > 170) is is_plain


def test_drafting_is_resumed_when_it_pays_again() -> None:
    pacer = Pacer(None, max_gamma=16)
    feed(pacer, accepted=0.0, pass_seconds=0.005)
    assert pacer.gamma in (0, 1)
    assert feed(pacer, accepted=1.0, pass_seconds=0.0005, rounds=1500)[-1] > 2


def test_alpha_does_not_count_drafts_behind_a_rejection() -> None:
    pacer = Pacer(4, max_gamma=4)
    # 1 of 4 each round: one accepted, one rejected, two unknown
    feed(pacer, accepted=0.25, pass_seconds=0.001, rounds=500)
    assert pacer.acceptance.alpha == pytest.approx(0.5, abs=0.02)


def test_rounds_without_drafts_do_not_change_alpha() -> None:
    pacer = Pacer(0, max_gamma=4)
    before = pacer.acceptance.alpha
    feed(pacer, accepted=0.0, pass_seconds=0.001, rounds=40_000)
    assert pacer.acceptance.alpha == before


def test_rounds_with_prompts_do_not_change_the_cost_estimate() -> None:
    pacer = Pacer(None, max_gamma=4)
    before = float(pacer.costs.verify_seconds(1)), pacer.costs.draft_pass_seconds(1)
    batch = Batch(
        [
            BatchEntry(
                sequence(), 3, needs_verdict=True, gamma=1, proposal=Proposal(1, 3, (5,), None, 3)
            )
        ],
        num_prompt_tokens=100,
    )
    pacer.observe(
        batch, batch.outcomes([Verdict(1, 1, 6, None)]), draft_seconds=9.0, verify_seconds=9.0
    )
    assert (float(pacer.costs.verify_seconds(1)), pacer.costs.draft_pass_seconds(1)) == before
