"""What the pipeline's benchmark makes of rounds and spans, on rounds whose figures are known."""

from __future__ import annotations

import pytest

from benchmarks.gamma_plot import plot
from benchmarks.pipeline import Decoding
from benchmarks.rig import Run, trace_of
from benchmarks.simulation_check import acceptance, decoding_rate, fit, overhead
from specserve.engine.batch import Outcome
from specserve.engine.pacer import Pacer
from specserve.engine.trace import Exchange, Round
from specserve.tools.timeline import draw, read
from specserve.types import Span


def run(
    *,
    verify: float,
    draft: float,
    accepted: tuple[int, ...],
    streams: int = 1,
    gamma: int = 4,
    beside: float = 0.001,
    link: float = 0.0,
) -> Run:
    """A prompt, then rounds that draft, verify, each a way there and a way back, and spend `beside` on everything else."""
    done, at = Run(0.0), 0.0
    decision = Pacer(gamma, max_gamma=8).decision
    for number, stand in enumerate((0, *accepted)):
        prompt = 100 if number == 0 else 0
        drafted, verified = at + draft + 2 * link, at + draft + verify + 4 * link
        outcomes = (
            ()
            if prompt
            else tuple(Outcome(i, gamma, stand, stand % 2 == 0) for i in range(streams))
        )
        rows = streams * (gamma + 1)
        done.rounds.append(
            Round(
                number,
                at,
                drafted,
                verified,
                verified,
                streams,
                rows,
                prompt,
                outcomes,
                streams * (stand + 1),
                decision,
            )
        )
        done.exchanges.append(
            Exchange("draft", at, drafted, (Span("draft", at + link, drafted - link),))
        )
        done.exchanges.append(
            Exchange(
                "target", drafted, verified, (Span("verify", drafted + link, verified - link),)
            )
        )
        at = verified + beside
    done.texts, done.ended = (
        {i: [0] * sum(stand + 1 for stand in accepted) for i in range(streams)},
        at,
    )
    return done


def test_the_target_s_share_of_the_time_and_the_round_are_taken_over_decoding_alone() -> None:
    one = Decoding((run(verify=0.008, draft=0.001, accepted=(3, 1, 2, 2, 0, 4)),))
    assert one.rounds == pytest.approx([0.010] * 4)
    assert one.busy == pytest.approx(5 * 0.008 / 0.049)
    assert one.committed == pytest.approx((2 + 3 + 3 + 1 + 5) / 5), (
        "the first round, whose drafts nobody could prepare, is left out"
    )
    assert one.hit_rate == pytest.approx(4 / 5)


def test_what_there_is_to_gain_is_measured_by_passes_and_not_by_rounds() -> None:
    fast, plain = (
        Decoding((run(verify=v, draft=0.001, accepted=a),))
        for v, a in ((0.010, (2,) * 8), (0.008, (0,) * 8))
    )
    assert fast.ideal_against(plain) == pytest.approx(3 * 0.8)


def test_a_simulation_is_fitted_by_passes_acceptance_and_what_lies_between() -> None:
    one, many = (
        run(
            verify=0.006 + 0.001 * n,
            draft=0.002,
            accepted=(3, 1, 2, 2, 0, 4) * 4,
            streams=n,
            beside=0.001 + 0.0001 * n,
        )
        for n in (1, 8)
    )
    fitted = fit(one, many)
    assert fitted.target.pass_time.seconds(5, 1, 0) == pytest.approx(0.007, rel=0.02)
    assert fitted.target.pass_time.seconds(40, 8, 0) == pytest.approx(0.014, rel=0.02)
    assert fitted.host.per_round == pytest.approx(0.001, rel=0.05)
    assert fitted.host.per_sequence == pytest.approx(0.0001, rel=0.05)
    assert overhead(one) == pytest.approx(0.0011)
    assert decoding_rate(one) == pytest.approx(3 / 0.0101, rel=0.05)


def test_a_way_is_what_an_exchange_takes_beside_its_work_and_none_of_the_hosts() -> None:
    one, many = (
        run(verify=0.006, draft=0.002, accepted=(3, 1, 2) * 4, streams=n, beside=0.001, link=0.0005)
        for n in (1, 8)
    )
    fitted = fit(one, many)
    assert fitted.target.link_s == pytest.approx(0.0005)
    assert fitted.draft.link_s == pytest.approx(0.0005)
    assert fitted.host.per_round == pytest.approx(0.001, rel=0.05)


def test_acceptance_at_a_place_counts_those_that_got_there() -> None:
    by_place = acceptance([run(verify=0.01, draft=0.001, accepted=(4, 4, 0, 2))]).by_position
    assert by_place == pytest.approx((2 / 3, 1.0, 1 / 2, 1.0))


def test_the_plot_and_the_picture_show_what_was_measured() -> None:
    picture = plot({1: {"0": [100.0, 110.0], "auto": [210.0, 220.0]}})
    assert ">2.05<" in picture
    assert "+4" in draw(
        read(trace_of(run(verify=0.01, draft=0.001, accepted=(3,) * 20)), first=None, count=6)
    )
