"""Percentiles, rates and predictions, against numbers that are known."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.theory import tokens_per_round
from specserve.tools.bench.acceptance import Acceptance
from specserve.tools.bench.counters import Counters, ServerSide
from specserve.tools.bench.measurement import Measured, Spread, compare, expected_tokens, percentile
from specserve.tools.bench.record import INTERRUPTED, Arrival, Record


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=300))
def test_percentiles_are_those_of_the_standard_library(values):
    ordered = sorted(values)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(ordered, number / 100) for number in range(1, 100)] == pytest.approx(
        cuts, abs=1e-6
    )
    assert (percentile(ordered, 0), percentile(ordered, 1)) == (ordered[0], ordered[-1])


def test_a_spread_of_one_value_is_that_value_and_of_none_is_none():
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 3.0)
    assert Spread.of([]) is None


def _texts(
    *, alpha: float, gamma: int, rounds: int, plain: int, seed: int
) -> tuple[Acceptance, dict[str, int]]:
    """Rounds whose drafts are accepted by chance, as theory has it."""
    chance, origins, accepted = random.Random(seed), ["plain"] * plain, 0
    for _ in range(rounds):
        length = next((i for i in range(gamma) if chance.random() >= alpha), gamma)
        origins += ["accepted"] * length + ["bonus" if length == gamma else "correction"]
        accepted += length
    return Acceptance.of(origins), {
        "rounds": rounds + plain,
        "drafted": gamma * rounds,
        "accepted": accepted,
        "anticipated": 0,
    }


def _record(
    number: int,
    *,
    sent: float,
    first: float,
    last: float,
    tokens: int,
    acceptance: Acceptance,
    speculation: object,
) -> Record:
    arrivals = (Arrival(first, 1), Arrival(last, tokens - 1))
    return Record(number, "ok", "", sent, last, arrivals, tokens, acceptance, speculation)  # type: ignore[arg-type]


def test_predictions_meet_what_obeys_their_assumptions():
    """One stream at a time, rounds of 20 ms, each request decoding without a pause: measured and predicted must agree."""
    records, now = [], 0.0
    for number in range(8):
        acceptance, speculation = _texts(alpha=0.8, gamma=5, rounds=500, plain=1, seed=number)
        tokens = 1 + 500 + speculation["accepted"]
        records.append(
            _record(
                number,
                sent=now,
                first=now + 0.02,
                last=now + 0.02 * 501,
                tokens=tokens,
                acceptance=acceptance,
                speculation=speculation,
            )
        )
        now += 0.02 * 501
    server = ServerSide.of(
        Counters({("round_seconds_sum", ""): 0.02 * 4008, ("round_seconds_count", ""): 4008.0})
    )
    measured = Measured.of(records, server)
    assert measured.acceptance.alpha == pytest.approx(0.8, abs=0.02)
    assert measured.speculation.mean_proposal == 5
    figures = {one.name: one for one in compare(measured)}
    assert list(figures) == ["tokens a round", "TPOT", "throughput"]
    assert figures["tokens a round"].predicted == pytest.approx(tokens_per_round(0.8, 5), rel=0.03)
    assert [one.ratio for one in figures.values()] == pytest.approx([1, 1, 1], abs=0.03)


def test_rates_are_over_the_time_from_the_first_request_to_the_last_end():
    nothing = Acceptance()
    records = [
        _record(0, sent=1.0, first=1.5, last=3.0, tokens=4, acceptance=nothing, speculation=None),
        _record(1, sent=2.0, first=2.5, last=5.0, tokens=6, acceptance=nothing, speculation=None),
    ]
    records.append(replace(records[0], number=2, outcome=INTERRUPTED, sent=2.0, ended=3.0))
    measured = Measured.of(records, None)
    assert measured.duration_s == 4.0
    assert measured.outcomes == {"ok": 2, INTERRUPTED: 1}
    assert measured.requests_per_s == 2 / 4
    assert measured.tokens_per_s == 14 / 4  # what an interrupted request wrote was written
    assert measured.mean_streams == (2 + 3 + 1) / 4
    assert measured.mean_decoding == (1.5 + 2.5 + 1.5) / 4
    assert measured.latency_s is not None
    assert measured.latency_s.mean == 2.5  # but it has no latency
    assert compare(measured) == []


def test_a_load_without_a_single_answer_has_figures_too():
    measured = Measured.of([], None)
    assert (measured.duration_s, measured.tokens_per_s, measured.ttft_s) == (0.0, 0.0, None)
    assert compare(measured) == []


def test_plain_decoding_is_predicted_to_write_one_token_a_round():
    record = _record(
        0,
        sent=0,
        first=1,
        last=2,
        tokens=5,
        acceptance=Acceptance(plain=5),
        speculation={"rounds": 5},
    )
    (figure,) = compare(Measured.of([record], None))
    assert (figure.measured, figure.predicted) == (1.0, 1.0)


def test_lengths_between_whole_ones_lie_between_their_tokens():
    assert expected_tokens(0.7, 4.0) == pytest.approx(tokens_per_round(0.7, 4))
    assert expected_tokens(0.7, 4.25) == pytest.approx(
        0.75 * tokens_per_round(0.7, 4) + 0.25 * tokens_per_round(0.7, 5)
    )
    assert expected_tokens(1.0, 2.5) == 3.5
