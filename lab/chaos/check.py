"""Checks of what clients saw: each text against its reference, its end, and its pauses.

Knows no processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lab.chaos.faults import Fault
from specserve.tools.bench.streams import Stream

# A gap in a stream counts as caused by a fault if it begins within this time after the fault.
PAUSE_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """One request and everything that came back."""

    prompt_id: int
    stream: Stream
    connection_error: str | None = None


@dataclass(frozen=True, slots=True)
class CheckCounts:
    """Requests of a chaos run by result. All counts but `complete` and `resumed` should be 0."""

    complete: int = 0
    lost: int = 0  # no text, or an error
    truncated: int = 0  # broken off, or without exactly one end
    different: int = 0  # missing, repeated or other tokens
    resumed: int = 0  # continued by another engine

    @classmethod
    def from_requests(
        cls, requests: Sequence[ChaosRequest], references: Mapping[int, str]
    ) -> CheckCounts:
        """Check every request against the reference text of its prompt."""
        results = [check_text(request, references[request.prompt_id]) for request in requests]
        resumed = sum(
            1
            for request in requests
            if (request.stream.final or {}).get("specserve", {}).get("resumed")
        )
        return cls(
            **{
                name: results.count(name) for name in ("complete", "lost", "truncated", "different")
            },
            resumed=resumed,
        )

    @property
    def num_failed(self) -> int:
        return self.lost + self.truncated + self.different


def check_text(request: ChaosRequest, reference: str) -> str:
    """Return "complete", "lost", "truncated" or "different".

    A complete answer has exactly one end, and every token of the reference once and in its place,
    with the same logprobs.
    """
    stream = request.stream
    if stream.status != 200 or stream.error is not None:
        return "lost"
    if request.connection_error is not None or stream.ended is None or stream.num_finals != 1:
        return "truncated"
    return "complete" if stream.answer == reference else "different"


def pauses_at(fault: Fault, requests: Sequence[ChaosRequest]) -> list[float]:
    """Return the longest gap at or soon after the fault, for each stream that was under way."""
    pauses = []
    for request in requests:
        times = request.stream.times
        end = max(fault.until, fault.at + PAUSE_WITHIN_S)
        gaps = [
            later - earlier
            for earlier, later in pairwise(times)
            if later > fault.at and earlier < end
        ]
        if times and times[0] < end and times[-1] > fault.at and gaps:
            pauses.append(max(gaps))
    return pauses


def all_gaps(requests: Sequence[ChaosRequest]) -> list[float]:
    """Return the time between any two neighbouring events of a stream, with or without faults."""
    return [later - earlier for one in requests for earlier, later in pairwise(one.stream.times)]
