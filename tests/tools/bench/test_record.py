"""Figures of one request, from given times."""

from __future__ import annotations

import json

import pytest

from specserve.tools.bench.record import BROKEN, INTERRUPTED, OK, RequestRecord
from specserve.tools.bench.streams import Stream


def _stream(**changes: object) -> Stream:
    """Return a stream sent at 100 s with tokens at 100.5 (1), 100.6 (3) and 100.9 (2)."""
    stream = Stream(
        sent=100.0,
        status=200,
        times=[100.5, 100.6, 100.9],
        origins=[["plain"], ["accepted", "accepted", "bonus"], ["accepted", "correction"]],
        final={"specserve": {"rounds": 3}},
        usage={"completion_tokens": 6},
        ended=101.0,
    )
    for name, value in changes.items():
        setattr(stream, name, value)
    return stream


def _record(stream: Stream, failure: str | None = None) -> RequestRecord:
    return RequestRecord.from_stream(7, stream, started=90.0, now=105.0, failure=failure)


def test_latencies_follow_from_the_times_of_the_events() -> None:
    record = _record(_stream())
    assert record.outcome == OK
    assert (record.sent, record.ended, record.latency) == (10.0, 11.0, 1.0)
    assert record.ttft == pytest.approx(0.5)
    assert record.tpot == pytest.approx(0.4 / 5)
    assert record.gaps == pytest.approx([0.1, 0.3])
    assert [event.tokens for event in record.events] == [1, 3, 2]
    assert record.speculation == {"rounds": 3}


def test_an_event_without_tokens_is_left_out() -> None:
    record = _record(
        _stream(
            times=[100.5, 100.6, 100.9, 102.0],
            origins=[["plain"], ["plain"], ["plain"], []],
            usage={"completion_tokens": 3},
        )
    )
    assert record.tpot == pytest.approx(0.4 / 2)
    assert len(record.events) == 3


def test_without_origins_the_tokens_are_spread_over_the_events() -> None:
    record = _record(_stream(origins=[(), (), ()], final={}))
    assert [event.tokens for event in record.events] == [2.0, 2.0, 2.0]
    assert record.tpot == pytest.approx(0.4 / 5)
    assert record.acceptance.rounds == 0


def test_a_single_token_has_no_time_per_token() -> None:
    record = _record(_stream(times=[100.5], origins=[["plain"]], usage={"completion_tokens": 1}))
    assert record.tpot is None
    assert record.ttft == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("changes", "failure", "outcome", "message"),
    [
        (
            {
                "status": 429,
                "body": json.dumps({"error": {"message": "the queue is full"}}).encode(),
            },
            None,
            "429",
            "the queue is full",
        ),
        ({"status": 502, "body": b"<html>Bad gateway"}, None, "502", "<html>Bad gateway"),
        ({"status": 502, "body": b'"text"'}, None, "502", '"text"'),
        (
            {"error": {"message": "the target fell over"}},
            None,
            "error in mid-stream",
            "the target fell over",
        ),
        ({"ended": None}, None, BROKEN, "the stream ended before the text did"),
        ({"final": None}, None, BROKEN, "the stream ended before the text did"),
        (
            {"ended": None},
            "no answer in time: it took longer than 3 s",
            "no answer in time",
            "it took longer than 3 s",
        ),
    ],
)
def test_a_failure_has_an_outcome_and_the_servers_message(
    changes: dict[str, object], failure: str | None, outcome: str, message: str
) -> None:
    record = _record(_stream(**changes), failure)
    assert (record.outcome, record.message) == (outcome, message)
    assert record.has_failed


def test_a_request_that_was_interrupted_has_not_failed_and_keeps_its_tokens() -> None:
    record = _record(_stream(ended=None, final=None, usage=None), INTERRUPTED)
    assert not record.has_failed
    assert not record.is_ok
    assert record.tokens == 6
    assert record.ended == 15.0
