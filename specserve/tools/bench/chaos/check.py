"""What a client saw, held against what it should have seen: each text, its end, and how long it stood still. Knows no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specserve.tools.bench.chaos.faults import Blow
from specserve.tools.bench.streams import Stream

PAUSE_WITHIN_S = 1.0  # after a blow, a stream that stands still does so because of it


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and all that came of it."""

    question: int
    stream: Stream
    trouble: str | None = None  # why the connection failed


@dataclass(frozen=True, slots=True)
class Tally:
    """Of all requests of a siege. All but `complete` and `resumed` should be 0."""

    complete: int = 0
    lost: int = 0  # no text, or an error
    truncated: int = 0  # broken off, or an end that is not one
    different: int = 0  # tokens missing, repeated, or other ones
    resumed: int = 0  # went on in another engine

    @classmethod
    def of(cls, asked: Sequence[Asked], texts: Mapping[int, str]) -> Tally:
        verdicts = [verdict(one, texts[one.question]) for one in asked]
        resumed = sum(
            1 for one in asked if (one.stream.final or {}).get("specserve", {}).get("resumed")
        )
        return cls(
            **{
                name: verdicts.count(name)
                for name in ("complete", "lost", "truncated", "different")
            },
            resumed=resumed,
        )

    @property
    def num_failed(self) -> int:
        return self.lost + self.truncated + self.different


def verdict(asked: Asked, text: str) -> str:
    """One terminal state, and every token of it once and in its place."""
    stream = asked.stream
    if stream.status != 200 or stream.error is not None:
        return "lost"
    if asked.trouble is not None or stream.ended is None or stream.num_finals != 1:
        return "truncated"
    return "complete" if "".join(stream.texts) == text else "different"


def pauses(blow: Blow, asked: Sequence[Asked]) -> list[float]:
    """Of each stream that was under way: how long it stood still at the blow, or soon after it."""
    found = []
    for one in asked:
        times = one.stream.times
        over = max(blow.until, blow.at + PAUSE_WITHIN_S)
        gaps = [
            later - earlier
            for earlier, later in pairwise(times)
            if later > blow.at and earlier < over
        ]
        if times and times[0] < over and times[-1] > blow.at and gaps:
            found.append(max(gaps))
    return found


def usual_pause(asked: Sequence[Asked]) -> list[float]:
    """Between any two events of a stream, whatever happened."""
    return [later - earlier for one in asked for earlier, later in pairwise(one.stream.times)]
