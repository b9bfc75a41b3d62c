"""Percentiles, rates and predictions, against known numbers."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.theory import tokens_per_round
from specserve.tools.bench.acceptance import AcceptanceCounts
from specserve.tools.bench.counters import Counters, ServerSide
from specserve.tools.bench.measurement import (
    Measurement,
    Spread,
    compare,
    expected_tokens,
    percentile,
)
from specserve.tools.bench.record import INTERRUPTED, RequestRecord, TokenEvent


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=300))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    ordered = sorted(values)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(ordered, number / 100) for number in range(1, 100)] == pytest.approx(
        cuts, abs=1e-6
    )
    assert (percentile(ordered, 0), percentile(ordered, 1)) == (ordered[0], ordered[-1])


def test_a_spread_of_one_value_is_that_value_and_of_none_is_none() -> None:
    assert Spread.from_values([3.0]) == Spread(3.0, 3.0, 3.0, 3.0)
    assert Spread.from_values([]) is None


def _texts(
    *, alpha: float, gamma: int, rounds: int, plain: int, seed: int
) -> tuple[AcceptanceCounts, dict[str, int]]:
    """Draw rounds whose draft tokens are accepted independently with probability alpha."""
    rng, origins, accepted = random.Random(seed), ["plain"] * plain, 0
    for _ in range(rounds):
        length = next((i for i in range(gamma) if rng.random() >= alpha), gamma)
        origins += ["accepted"] * length + ["bonus" if length == gamma else "correction"]
        accepted += length
    return AcceptanceCounts.from_origins(origins), {
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
    acceptance: AcceptanceCounts,
    speculation: dict[str, int] | None,
) -> RequestRecord:
    events = (TokenEvent(first, 1), TokenEvent(last, tokens - 1))
    return RequestRecord(number, "ok", "", sent, last, events, tokens, acceptance, speculation)


def test_predictions_hold_where_their_assumptions_do() -> None:
    """One stream at a time decodes without a pause in rounds of 20 ms, as theory assumes."""
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
    server = ServerSide.from_counters(
        Counters({("round_seconds_sum", ""): 0.02 * 4008, ("round_seconds_count", ""): 4008.0})
    )
    measured = Measurement.from_records(records, server)
    assert measured.acceptance.alpha == pytest.approx(0.8, abs=0.02)
    assert measured.speculation.mean_proposal == 5
    figures = {one.name: one for one in compare(measured)}
    assert list(figures) == ["tokens a round", "TPOT", "throughput"]
    assert figures["tokens a round"].predicted == pytest.approx(tokens_per_round(0.8, 5), rel=0.03)
    assert [one.ratio for one in figures.values()] == pytest.approx([1, 1, 1], abs=0.03)


def test_rates_are_over_the_time_from_the_first_request_to_the_last_end() -> None:
    nothing = AcceptanceCounts()
    records = [
        _record(0, sent=1.0, first=1.5, last=3.0, tokens=4, acceptance=nothing, speculation=None),
        _record(1, sent=2.0, first=2.5, last=5.0, tokens=6, acceptance=nothing, speculation=None),
    ]
    records.append(replace(records[0], number=2, outcome=INTERRUPTED, sent=2.0, ended=3.0))
    measured = Measurement.from_records(records, None)
    assert measured.duration_s == 4.0
    assert measured.outcomes == {"ok": 2, INTERRUPTED: 1}
    assert measured.requests_per_s == 2 / 4
    assert measured.tokens_per_s == 14 / 4  # tokens of an interrupted request count
    assert measured.mean_streams == (2 + 3 + 1) / 4
    assert measured.mean_decoding == (1.5 + 2.5 + 1.5) / 4
    assert measured.latency_s is not None
    assert measured.latency_s.mean == 2.5  # but it has no latency
    assert compare(measured) == []


def test_a_load_without_a_single_answer_has_figures_too() -> None:
    measured = Measurement.from_records([], None)
    assert (measured.duration_s, measured.tokens_per_s, measured.ttft_s) == (0.0, 0.0, None)
    assert compare(measured) == []


def test_plain_decoding_is_predicted_to_write_one_token_a_round() -> None:
    record = _record(
        0,
        sent=0,
        first=1,
        last=2,
        tokens=5,
        acceptance=AcceptanceCounts(plain=5),
        speculation={"rounds": 5},
    )
    (figure,) = compare(Measurement.from_records([record], None))
    assert (figure.measured, figure.predicted) == (1.0, 1.0)


def test_lengths_between_whole_ones_lie_between_their_tokens() -> None:
    assert expected_tokens(0.7, 4.0) == pytest.approx(tokens_per_round(0.7, 4))
    assert expected_tokens(0.7, 4.25) == pytest.approx(
        0.75 * tokens_per_round(0.7, 4) + 0.25 * tokens_per_round(0.7, 5)
    )
    assert expected_tokens(1.0, 2.5) == 3.5
