"""A stream that breaks counts against the fault, but for streams of the gateway that was struck."""

from __future__ import annotations

from pathlib import Path

from specserve.tools.bench.streams import Stream
from tests.chaos.gateway_outcomes import Outcome, Request, Strike, added

STRUCK, OTHER = 1, 2


def request(seed: int, port: int | None, *, is_broken: bool = False) -> Request:
    """Return a stream with a gap from 10 s to 12 s, across the fault at 11 s."""
    stream = Stream(sent=9.0, times=[9.5, 10.0, 12.0, 12.1])
    return Request(seed, stream, port, over=13.0, is_broken=is_broken)


STRIKE = Strike(11.0, STRUCK, num_sequences=2, gone=0.7)


def test_broken_streams_are_counted_by_whose_gateway_was_struck() -> None:
    requests = [
        request(1, STRUCK, is_broken=True),
        request(2, OTHER),
        request(3, OTHER, is_broken=True),
        request(4, None, is_broken=True),
    ]
    outcome = Outcome.from_strikes([STRIKE], requests)
    assert (outcome.num_own_broken, outcome.num_others_broken, outcome.num_not_begun) == (1, 1, 1)
    assert outcome.num_others == 2
    assert outcome.pauses == [2.0]
    assert not outcome.is_harmless


def test_the_outcomes_of_several_runs_add_up(tmp_path: Path) -> None:
    outcome = Outcome.from_strikes([STRIKE], [request(1, STRUCK, is_broken=True)])
    assert outcome.is_harmless
    added(tmp_path / "outcomes", [("kill", outcome)])
    sums = added(tmp_path / "outcomes", [("kill", outcome)])
    assert sums["kill"].gone == [0.7, 0.7]
    assert sums["kill"].row("kill").startswith("| kill | 2 | 4 | 0.70 s | 0.70 s | 0.70 s | 2 |")
