"""What rounds leave behind: counters by position, histograms, and a trace that Perfetto opens."""

from __future__ import annotations

import json

from specserve.engine.batch import Outcome
from specserve.engine.pacer import Pacer
from specserve.engine.trace import Exchange, Journal, Round
from specserve.metrics import Registry
from specserve.types import Span


def a_round(
    number: int, outcomes: tuple[tuple[int, int], ...], *, anticipated: bool | None = None
) -> Round:
    begun, made = (
        float(number),
        tuple(
            Outcome(i, proposed, accepted, anticipated)
            for i, (proposed, accepted) in enumerate(outcomes)
        ),
    )
    return Round(
        number,
        begun,
        begun + 0.01,
        begun + 0.04,
        begun + 0.05,
        2,
        10,
        0,
        made,
        5,
        Pacer(4, max_gamma=8).decision,
    )


def test_acceptance_is_counted_by_position():
    registry = Registry()
    journal = Journal(registry)
    journal.record(a_round(1, ((4, 2), (4, 0))))
    journal.record(a_round(2, ((3, 3),)))
    samples = registry.snapshot().samples
    assert samples["spec_decode_num_drafts_total"] == {(): (3.0,)}
    assert samples["spec_decode_num_draft_tokens_total"] == {(): (11.0,)}
    assert samples["spec_decode_num_accepted_tokens_total"] == {(): (5.0,)}
    assert samples["spec_decode_num_accepted_tokens_per_pos_total"] == {
        ("0",): (2.0,),
        ("1",): (2.0,),
        ("2",): (1.0,),
    }


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
    assert {span["args"]["pacer"]["gamma"] for span in spans if span["name"] == "round"} == {4}, (
        "each round says why it was drafted for like this"
    )
    (verify,) = [span for span in spans if span["name"] == "verify" and span["args"]["round"] == 3]
    assert (round(verify["ts"]), round(verify["dur"])) == (3_010_000, 30_000)
    assert (verify["args"]["drafted"], verify["args"]["accepted"]) == (4, 2)


def test_a_part_of_the_trace_has_the_last_rounds_and_what_was_done_in_their_time() -> None:
    journal = Journal(Registry())
    for number in range(5):
        journal.exchange(
            Exchange(
                "target",
                number + 0.01,
                number + 0.04,
                (Span("verify", number + 0.01, number + 0.04),),
            )
        )
        journal.record(a_round(number, ((4, 2),)))
    spans = [event for event in journal.trace(2)["traceEvents"] if event["ph"] == "X"]
    assert sorted({span["args"]["round"] for span in spans if span["name"] == "round"}) == [3, 4]
    assert sum(span["name"] == "to target" for span in spans) == 2
    assert journal.trace(5) == journal.trace(100) == journal.trace()


def test_what_workers_did_stands_in_their_own_lanes_with_the_way_there_and_back() -> None:
    journal = Journal(Registry())
    journal.record(a_round(1, ((4, 2),), anticipated=True))
    journal.exchange(
        Exchange("draft", 1.0, 1.009, (Span("anticipate", 0.9, 0.99), Span("draft", 1.001, 1.008)))
    )
    journal.exchange(
        Exchange("target", 0.5, 0.6, (Span("verify", 0.51, 0.59),))
    )  # of a round that is not kept any more
    events = journal.trace()["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    drawn = {
        (lanes[event["tid"]], event["name"]): (round(event["ts"]), round(event["dur"]))
        for event in events
        if event["ph"] == "X"
    }
    assert drawn["draft", "draft"] == (1_001_000, 7_000)
    assert drawn["draft", "anticipate"] == (900_000, 90_000)
    assert drawn["link", "to draft"] == (1_000_000, 1_000)
    assert drawn["link", "from draft"] == (1_008_000, 1_000)
    assert ("target", "verify") not in drawn


def test_hits_and_misses_of_anticipation_are_counted_and_what_nobody_could_prepare_is_neither() -> (
    None
):
    registry = Registry()
    journal = Journal(registry)
    journal.record(a_round(1, ((4, 2), (4, 0)), anticipated=True))
    journal.record(a_round(2, ((4, 2),), anticipated=False))
    journal.record(a_round(3, ((4, 2),), anticipated=None))
    samples = registry.snapshot().samples
    assert samples["anticipation_hits_total"] == {(): (2.0,)}
    assert samples["anticipation_misses_total"] == {(): (1.0,)}
