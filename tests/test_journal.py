"""What rounds leave behind: counters by position, histograms, and a trace that Perfetto opens."""

from __future__ import annotations

import json

from specserve.engine.journal import Journal, Round
from specserve.metrics import Registry


def a_round(number: int, outcomes: tuple[tuple[int, int], ...]) -> Round:
    begun = float(number)
    return Round(number, begun, begun + 0.01, begun + 0.04, begun + 0.05, 2, 0, outcomes, 5)


def test_acceptance_is_counted_by_position():
    registry = Registry()
    journal = Journal(registry)
    journal.record(a_round(1, ((4, 2), (4, 0))))
    journal.record(a_round(2, ((3, 3),)))
    samples = registry.snapshot().samples
    assert samples["spec_decode_num_drafts_total"] == {(): (3.0,)}
    assert samples["spec_decode_num_draft_tokens_total"] == {(): (11.0,)}
    assert samples["spec_decode_num_accepted_tokens_total"] == {(): (5.0,)}
    assert samples["spec_decode_num_accepted_tokens_per_pos_total"] == {("0",): (2.0,), ("1",): (2.0,), ("2",): (1.0,)}


def test_a_round_without_drafts_is_no_observation_of_drafting():
    registry = Registry()
    Journal(registry).record(a_round(1, ()))
    samples = registry.snapshot().samples
    assert sum(samples["draft_seconds"][()][:-1]) == 0
    assert sum(samples["verify_seconds"][()][:-1]) == sum(samples["round_seconds"][()][:-1]) == 1


def test_the_trace_has_each_worker_s_span_in_microseconds_and_forgets_old_rounds():
    journal = Journal(Registry(), kept=3)
    for number in range(5):
        journal.record(a_round(number, ((4, 2),)))
    trace = json.loads(json.dumps(journal.trace()))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sorted({span["args"]["round"] for span in spans}) == [2, 3, 4]
    (verify,) = [span for span in spans if span["name"] == "verify" and span["args"]["round"] == 3]
    assert (round(verify["ts"]), round(verify["dur"])) == (3_010_000, 30_000)
    assert (verify["args"]["drafted"], verify["args"]["accepted"]) == (4, 2)
