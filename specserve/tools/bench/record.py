"""What one request came to, and what follows from its times alone. Times are seconds since the load began; knows no other requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specserve.tools.bench.acceptance import Acceptance
from specserve.tools.bench.streams import Stream

OK, INTERRUPTED, BROKEN = "ok", "interrupted", "broken off"


@dataclass(frozen=True, slots=True)
class Arrival:
    """An event of a stream that brought tokens."""

    at: float
    tokens: float  # a fraction where the server does not say how many, and they are spread evenly over the events


@dataclass(frozen=True, slots=True)
class Record:
    """A request that was answered in full, refused, cut off, or given up."""

    number: int
    outcome: str  # OK, INTERRUPTED (by who measures), a status such as 429, or what went wrong
    message: str  # of a failure
    sent: float
    ended: float
    arrivals: tuple[Arrival, ...]
    tokens: int
    acceptance: Acceptance
    speculation: Mapping[str, Any] | None  # the response's `specserve` object

    @classmethod
    def of(
        cls, number: int, stream: Stream, *, begun: float, now: float, trouble: str | None = None
    ) -> Record:
        """Of a stream that ended, or that `trouble` ended."""
        known = sum(map(len, stream.origins))
        tokens = stream.usage["completion_tokens"] if stream.usage else known or len(stream.times)
        each = None if known else tokens / max(1, len(stream.times))
        events = zip(stream.times, stream.origins, strict=True)
        arrivals = [
            Arrival(at - begun, len(origins) if each is None else each)
            for at, origins in events
            if origins or each is not None
        ]
        outcome, message = _outcome(stream, trouble)
        return cls(
            number=number,
            outcome=outcome,
            message=message,
            sent=(stream.sent or now) - begun,
            ended=(stream.ended or now) - begun,
            arrivals=tuple(arrivals),
            tokens=tokens,
            acceptance=Acceptance.of([origin for origins in stream.origins for origin in origins]),
            speculation=None if stream.final is None else stream.final.get("specserve"),
        )

    @property
    def is_ok(self) -> bool:
        return self.outcome == OK

    @property
    def has_failed(self) -> bool:
        return self.outcome not in (OK, INTERRUPTED)

    @property
    def latency(self) -> float:
        return self.ended - self.sent

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return self.arrivals[0].at - self.sent if self.arrivals else None

    @property
    def decoding(self) -> float:
        """From the first token to the last."""
        return self.arrivals[-1].at - self.arrivals[0].at if self.arrivals else 0.0

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for a text of one."""
        return self.decoding / (self.tokens - 1) if self.tokens > 1 and self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        """Between one event with tokens and the next: inter-token latency, as a reader sees it."""
        return [later.at - earlier.at for earlier, later in pairwise(self.arrivals)]


def _outcome(stream: Stream, trouble: str | None) -> tuple[str, str]:
    if trouble is not None:
        outcome, _, message = trouble.partition(": ")
        return outcome, message
    if stream.status != 200:
        return str(stream.status), _message(stream.body)
    if stream.error is not None:
        return "error in mid-stream", str(stream.error.get("message", stream.error))
    if stream.final is None or stream.ended is None:
        return BROKEN, "the stream ended before the text did"
    return OK, ""


def _message(body: bytes) -> str:
    """The server's own words, if they come as they should."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace").strip()
