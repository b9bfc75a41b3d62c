"""Figures of the pipeline benchmark, computed from rounds and spans whose figures are known."""

from __future__ import annotations

import pytest

from lab.bench.gamma_plot import plot
from lab.bench.pipeline import DecodeFigures
from lab.bench.rig import LoopRun, trace_of
from lab.bench.simulation_check import (
    CurvePassTime,
    decode_rate,
    fit_devices,
    idle_seconds,
    measured_acceptance,
    with_own_passes,
)
from lab.simulate.scenario import Mode
from specserve.engine.batch import Outcome
from specserve.engine.pacer import Pacer
from specserve.engine.trace import Exchange, Round
from specserve.tools.timeline import COLOURS, LEGEND, draw, select_rounds
from specserve.types import Span


def make_run(
    *,
    verify: float,
    draft: float,
    accepted: tuple[int, ...],
    streams: int = 1,
    gamma: int = 4,
    host: float = 0.001,
    link: float = 0.0,
    is_apart: bool = True,
) -> LoopRun:
    """Return a run of a prompt and rounds that take `draft` and `verify` seconds.

    Each of the two takes `link` seconds each way, and everything else in a round takes `host`. A
    draft that is not apart is in the target's worker, which reports on both.
    """
    run, start = LoopRun(0.0), 0.0
    decision = Pacer(gamma, max_gamma=8).decision
    for number, num_accepted in enumerate((0, *accepted)):
        prompt = 100 if number == 0 else 0
        drafted, verified = start + draft + 2 * link, start + draft + verify + 4 * link
        outcomes = (
            ()
            if prompt
            else tuple(
                Outcome(i, gamma, num_accepted, num_accepted % 2 == 0) for i in range(streams)
            )
        )
        rows = streams * (gamma + 1)
        run.rounds.append(
            Round(
                number,
                start,
                drafted,
                verified,
                verified,
                streams,
                rows,
                prompt,
                outcomes,
                streams * (num_accepted + 1),
                decision,
            )
        )
        draft_span = Span("draft", start + link, drafted - link)
        if is_apart:
            run.exchanges.append(Exchange("draft", start, drafted, (draft_span,)))
        earlier = () if is_apart else (draft_span,)
        verify_span = Span("verify", drafted + link, verified - link)
        run.exchanges.append(Exchange("target", drafted, verified, (*earlier, verify_span)))
        start = verified + host
    num_tokens = sum(num_accepted + 1 for num_accepted in accepted)
    run.output_ids, run.end = {i: [0] * num_tokens for i in range(streams)}, start
    return run


def test_busy_share_and_round_times_are_taken_over_decode_rounds_alone() -> None:
    figures = DecodeFigures((make_run(verify=0.008, draft=0.001, accepted=(3, 1, 2, 2, 0, 4)),))
    assert figures.round_seconds == pytest.approx([0.010] * 4)
    assert figures.busy_share == pytest.approx(5 * 0.008 / 0.049)
    assert figures.committed_per_round == pytest.approx((2 + 3 + 3 + 1 + 5) / 5), (
        "the first round, whose drafts could not be prepared, is left out"
    )
    assert figures.hit_rate == pytest.approx(4 / 5)


def test_ideal_ratio_is_computed_from_passes_and_not_from_rounds() -> None:
    fast, plain = (
        DecodeFigures((make_run(verify=verify, draft=0.001, accepted=accepted),))
        for verify, accepted in ((0.010, (2,) * 8), (0.008, (0,) * 8))
    )
    assert fast.ideal_ratio_to(plain) == pytest.approx(3 * 0.8)


def test_simulation_is_fitted_to_passes_acceptance_and_host_time() -> None:
    one, many = (
        make_run(
            verify=0.006 + 0.001 * n,
            draft=0.002,
            accepted=(3, 1, 2, 2, 0, 4) * 4,
            streams=n,
            host=0.001 + 0.0001 * n,
        )
        for n in (1, 8)
    )
    fitted = fit_devices(one, many, curve=((1, 0.007), (40, 0.007)), gamma=4)
    assert fitted.target.pass_time.seconds(5, 1, 0) == pytest.approx(0.007, rel=0.02)
    assert fitted.target.pass_time.seconds(40, 8, 0) == pytest.approx(0.014, rel=0.02)
    assert fitted.host.per_round == pytest.approx(0.001, rel=0.05)
    assert fitted.host.per_sequence == pytest.approx(0.0001, rel=0.05)
    assert idle_seconds(one) == pytest.approx(0.0011)
    assert decode_rate(one) == pytest.approx(3 / 0.0101, rel=0.05)


def test_passes_of_the_warm_up_are_stretched_to_those_of_the_runs() -> None:
    curve = ((1, 0.010), (8, 0.010), (16, 0.020), (32, 0.040))
    passes = CurvePassTime(curve)
    assert passes.seconds(12, 1, 0) == pytest.approx(0.015)
    assert passes.seconds(64, 1, 0) == pytest.approx(0.080), "beyond the curve in proportion"
    one, many = (
        make_run(verify=verify, draft=0.001, accepted=(1, 2) * 8, streams=n)
        for n, verify in ((1, 0.011), (8, 0.051))
    )
    fitted = passes.fitted_to(one, many, rows=4)
    assert fitted.seconds(4, 1, 0) == pytest.approx(0.011)
    assert fitted.seconds(32, 8, 0) == pytest.approx(0.051)
    # 28 rows of further sequences took 7 ms more than the curve says, and 7 are here.
    assert fitted.seconds(8, 8, 0) == pytest.approx(0.011 + 0.007 / 4)


def test_a_pass_of_the_warm_up_is_no_longer_than_one_of_more_rows() -> None:
    passes = CurvePassTime(((1, 0.013), (2, 0.012), (4, 0.010), (8, 0.020)))
    assert [passes.seconds(rows, 1, 0) for rows in (1, 2, 4, 8)] == pytest.approx(
        [0.010, 0.010, 0.010, 0.020]
    )


def test_link_time_is_the_part_of_an_exchange_outside_its_work_and_not_the_host_s() -> None:
    one, many = (
        make_run(
            verify=0.006, draft=0.002, accepted=(3, 1, 2) * 4, streams=n, host=0.001, link=0.0005
        )
        for n in (1, 8)
    )
    fitted = fit_devices(one, many, curve=((1, 0.007), (40, 0.007)), gamma=4)
    assert fitted.target.link_s == pytest.approx(0.0005)
    assert fitted.draft.link_s == pytest.approx(0.0005)
    assert fitted.host.per_round == pytest.approx(0.001, rel=0.05)


def test_a_draft_in_the_target_s_process_is_fitted_to_what_that_reports() -> None:
    one, many = (
        make_run(
            verify=0.006 + 0.001 * n,
            draft=0.004,
            accepted=(3, 1, 2) * 4,
            streams=n,
            link=0.0005,
            is_apart=False,
        )
        for n in (1, 8)
    )
    fitted = fit_devices(one, many, curve=((1, 0.007), (40, 0.007)), gamma=4, is_apart=False)
    assert fitted.target.link_s == pytest.approx(0.0005), "drafting is no part of the exchange"
    assert fitted.draft.link_s == 0
    assert fitted.draft.pass_time.seconds(1, 1, 0) == pytest.approx(0.001)
    # The run has the links of a draft apart, of which a draft together has half.
    assert fitted.host.per_round == pytest.approx(0.001 + 0.001, rel=0.05)


def test_a_run_is_simulated_with_its_own_passes_of_all_that_waits_for_drafts() -> None:
    one, many, slow = (
        make_run(verify=verify, draft=draft, accepted=(3, 1, 2) * 4, streams=n)
        for n, verify, draft in ((1, 0.007, 0.002), (8, 0.014, 0.002), (8, 0.028, 0.004))
    )
    fitted = fit_devices(one, many, curve=((1, 0.007), (40, 0.007)), gamma=4)
    for mode, draft in ((Mode.LOCKSTEP, 0.001), (Mode.ANTICIPATED, 0.0005), (Mode.PLAIN, 0.0005)):
        own = with_own_passes(fitted, slow, mode, 4)
        assert own.target.pass_time.seconds(40, 8, 0) == pytest.approx(0.028)
        assert own.draft.pass_time.seconds(8, 8, 0) == pytest.approx(draft)
        assert own.host == fitted.host


def test_acceptance_at_a_position_counts_the_tokens_verified_there() -> None:
    run = make_run(verify=0.01, draft=0.001, accepted=(4, 4, 0, 2))
    assert measured_acceptance([run]).by_position == pytest.approx((2 / 3, 1.0, 1 / 2, 1.0))


def test_plot_and_timeline_show_the_measured_figures() -> None:
    bars = plot({1: {"0": [100.0, 110.0], "auto": [210.0, 220.0]}})
    assert ">215<" in bars, "the number that stands in the table"
    trace = trace_of(make_run(verify=0.01, draft=0.001, accepted=(3,) * 20))
    drawn = draw(select_rounds(trace, first=None, count=6))
    assert "+4" in drawn
    assert LEGEND.keys() == COLOURS.keys(), "a block without its colour in the legend"
    assert all(words in drawn for words in LEGEND.values())
