"""The result of one request and the latencies that follow from its times.

Times are seconds since the load began. Knows no other requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specserve.tools.bench.acceptance import AcceptanceCounts
from specserve.tools.bench.streams import Stream

OK, INTERRUPTED, BROKEN = "ok", "interrupted", "broken off"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """An event of a stream that brought tokens."""

    at: float
    # A fraction where the server does not send origins: the tokens are spread evenly over events.
    tokens: float


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that was answered in full, refused, cut off, or interrupted."""

    number: int
    outcome: str  # OK, INTERRUPTED (by the user), a status such as 429, or a kind of failure
    message: str  # what a failure says
    sent: float
    ended: float
    events: tuple[TokenEvent, ...]
    tokens: int
    acceptance: AcceptanceCounts
    speculation: Mapping[str, Any] | None  # the response's `specserve` object

    @classmethod
    def from_stream(
        cls, number: int, stream: Stream, *, started: float, now: float, failure: str | None = None
    ) -> RequestRecord:
        """Record a stream that ended, by itself or by `failure` ("outcome: message")."""
        known = sum(map(len, stream.origins))
        tokens = stream.usage["completion_tokens"] if stream.usage else known or len(stream.times)
        each = None if known else tokens / max(1, len(stream.times))
        events = [
            TokenEvent(at - started, len(origins) if each is None else each)
            for at, origins in zip(stream.times, stream.origins, strict=True)
            if origins or each is not None
        ]
        outcome, message = _outcome(stream, failure)
        return cls(
            number=number,
            outcome=outcome,
            message=message,
            sent=(stream.sent or now) - started,
            ended=(stream.ended or now) - started,
            events=tuple(events),
            tokens=tokens,
            acceptance=AcceptanceCounts.from_origins(
                [origin for origins in stream.origins for origin in origins]
            ),
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
        return self.events[0].at - self.sent if self.events else None

    @property
    def decoding(self) -> float:
        """Seconds from the first token to the last."""
        return self.events[-1].at - self.events[0].at if self.events else 0.0

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, or None for a single token."""
        return self.decoding / (self.tokens - 1) if self.tokens > 1 and self.events else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between events with tokens: inter-token latency, as a reader sees it."""
        return [later.at - earlier.at for earlier, later in pairwise(self.events)]


def _outcome(stream: Stream, failure: str | None) -> tuple[str, str]:
    if failure is not None:
        outcome, _, message = failure.partition(": ")
        return outcome, message
    if stream.status != 200:
        return str(stream.status), _message(stream.body)
    if stream.error is not None:
        return "error in mid-stream", str(stream.error.get("message", stream.error))
    if stream.final is None or stream.ended is None:
        return BROKEN, "the stream ended before the text did"
    return OK, ""


def _message(body: bytes) -> str:
    """Return the server's error message, or the start of a body that is no OpenAI error."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace").strip()
