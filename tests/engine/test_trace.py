"""Counters by position, histograms, and a trace that Perfetto opens, from recorded rounds."""

from __future__ import annotations

import json

from specserve.engine.batch import Outcome
from specserve.engine.pacer import Pacer
from specserve.engine.trace import SLOW_PASS, DeviceEvent, Exchange, Round, TraceJournal
from specserve.metrics import Registry
from specserve.types import Span


def a_round(
    number: int, outcomes: tuple[tuple[int, int], ...], *, anticipated: bool | None = None
) -> Round:
    start = float(number)
    return Round(
        number,
        start,
        drafted_at=start + 0.01,
        verified_at=start + 0.04,
        end=start + 0.05,
        num_sequences=2,
        num_positions=10,
        num_prompt_tokens=0,
        outcomes=tuple(
            Outcome(i, proposed, accepted, anticipated)
            for i, (proposed, accepted) in enumerate(outcomes)
        ),
        num_committed=5,
        decision=Pacer(4, max_gamma=8).decision,
    )


def test_acceptance_is_counted_by_position() -> None:
    registry = Registry()
    journal = TraceJournal(registry)
    journal.record_round(a_round(1, ((4, 2), (4, 0))))
    journal.record_round(a_round(2, ((3, 3),)))
    samples = registry.snapshot().samples
    assert samples["spec_decode_num_drafts_total"] == {(): (3.0,)}
    assert samples["spec_decode_num_draft_tokens_total"] == {(): (11.0,)}
    assert samples["spec_decode_num_accepted_tokens_total"] == {(): (5.0,)}
    assert samples["spec_decode_num_accepted_tokens_per_pos_total"] == {
        ("0",): (2.0,),
        ("1",): (2.0,),
        ("2",): (1.0,),
    }


def test_a_round_without_drafts_is_not_in_the_histogram_of_drafting() -> None:
    registry = Registry()
    TraceJournal(registry).record_round(a_round(1, ()))
    samples = registry.snapshot().samples
    assert sum(samples["draft_seconds"][()][:-1]) == 0
    assert sum(samples["verify_seconds"][()][:-1]) == sum(samples["round_seconds"][()][:-1]) == 1


def test_the_trace_has_spans_in_microseconds_and_drops_old_rounds() -> None:
    journal = TraceJournal(Registry(), max_rounds=3)
    for number in range(5):
        journal.record_round(a_round(number, ((4, 2),)))
    trace = json.loads(json.dumps(journal.trace()))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sorted({span["args"]["round"] for span in spans}) == [2, 3, 4]
    assert {span["args"]["pacer"]["gamma"] for span in spans if span["name"] == "round"} == {4}, (
        "each round has the decision that it was drafted by"
    )
    (verify,) = [span for span in spans if span["name"] == "verify" and span["args"]["round"] == 3]
    assert (round(verify["ts"]), round(verify["dur"])) == (3_010_000, 30_000)
    assert (verify["args"]["drafted"], verify["args"]["accepted"]) == (4, 2)


def test_a_part_of_the_trace_has_the_last_rounds_and_their_exchanges() -> None:
    journal = TraceJournal(Registry())
    for number in range(5):
        journal.record_exchange(
            Exchange(
                "target",
                number + 0.01,
                number + 0.04,
                (Span("verify", number + 0.01, number + 0.04),),
            )
        )
        journal.record_round(a_round(number, ((4, 2),)))
    spans = [event for event in journal.trace(2)["traceEvents"] if event["ph"] == "X"]
    assert sorted({span["args"]["round"] for span in spans if span["name"] == "round"}) == [3, 4]
    assert sum(span["name"] == "to target" for span in spans) == 2
    assert journal.trace(5) == journal.trace(100) == journal.trace()


def test_each_worker_has_its_own_lane_and_the_link_shows_both_directions() -> None:
    journal = TraceJournal(Registry())
    journal.record_round(a_round(1, ((4, 2),), anticipated=True))
    journal.record_exchange(
        Exchange("draft", 1.0, 1.009, (Span("anticipate", 0.9, 0.99), Span("draft", 1.001, 1.008)))
    )
    journal.record_exchange(
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


def test_proposals_without_anticipation_are_neither_hits_nor_misses() -> None:
    registry = Registry()
    journal = TraceJournal(registry)
    journal.record_round(a_round(1, ((4, 2), (4, 0)), anticipated=True))
    journal.record_round(a_round(2, ((4, 2),), anticipated=False))
    journal.record_round(a_round(3, ((4, 2),), anticipated=None))
    samples = registry.snapshot().samples
    assert samples["anticipation_hits_total"] == {(): (2.0,)}
    assert samples["anticipation_misses_total"] == {(): (1.0,)}


def test_a_slow_pass_is_counted_and_stands_in_the_lane_of_its_worker() -> None:
    registry = Registry()
    journal = TraceJournal(registry)
    journal.record_event(DeviceEvent(SLOW_PASS, "target", 0.5, {"seconds": 1.0}))
    journal.record_round(a_round(1, ((4, 2),)))
    journal.record_event(DeviceEvent(SLOW_PASS, "target", 1.5, {"seconds": 2.0}))
    events = json.loads(json.dumps(journal.trace()))["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    (instant,) = [event for event in events if event["ph"] == "i"]  # the first one is older
    assert (lanes[instant["tid"]], instant["name"], instant["args"]) == (
        "target",
        "slow pass",
        {"seconds": 2.0},
    )
    assert instant["ts"] == 1_500_000
    assert registry.snapshot().samples["slow_passes_total"] == {("target",): (2.0,)}
