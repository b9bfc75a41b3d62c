"""Record of the rounds: metrics of all of them, and a trace of the last ones.

Knows seconds and counts; no workers, no network.
"""

from __future__ import annotations

from collections import abc, deque
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from specserve.engine.batch import Outcome
from specserve.engine.pacer import Decision
from specserve.metrics import Registry
from specserve.types import Span


@dataclass(frozen=True, slots=True)
class Round:
    """One round, with its four times by the coordinator's clock."""

    number: int
    start: float
    drafted_at: float  # when it had its proposals
    verified_at: float  # when it had its verdicts
    end: float  # when it had committed them
    num_sequences: int
    num_positions: int  # in the target's pass
    num_prompt_tokens: int
    outcomes: tuple[Outcome, ...]  # of the sequences that had a proposal
    num_committed: int
    decision: Decision  # of the pacer, for this round


@dataclass(frozen=True, slots=True)
class Exchange:
    """A message to a worker and its answer, by the coordinator's clock.

    `spans` are what the worker did since its last answer, by the same clock.
    """

    role: str  # target or draft
    sent_at: float
    answered_at: float
    spans: tuple[Span, ...]

    @property
    def busy_seconds(self) -> float:
        return sum(span.end - span.start for span in self.spans)


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Something that went wrong with a worker's device, by the coordinator's clock."""

    name: str
    role: str  # target or draft
    at: float
    about: abc.Mapping[str, Any]


SLOW_PASS = "slow pass"
"""Event that is counted, too."""
AVOIDED_DEVICE = "avoided device"


class TraceJournal:
    """A record of rounds, exchanges and events: metrics, and a trace of the last rounds."""

    def __init__(self, registry: Registry, *, max_rounds: int = 2000) -> None:
        self._registry = registry
        self._rounds: deque[Round] = deque(maxlen=max_rounds)
        self._exchanges: deque[Exchange] = deque(maxlen=2 * max_rounds)
        self._events: deque[DeviceEvent] = deque(maxlen=max_rounds)

    def record_exchange(self, exchange: Exchange) -> None:
        self._exchanges.append(exchange)

    def record_event(self, event: DeviceEvent) -> None:
        self._events.append(event)
        if event.name == SLOW_PASS:
            self._registry.counter("slow_passes_total").add(1, event.role)

    def record_round(self, done: Round) -> None:
        self._rounds.append(done)
        self._registry.histogram("round_seconds").observe(done.end - done.start)
        self._registry.histogram("verify_seconds").observe(done.verified_at - done.drafted_at)
        if done.outcomes:
            self._registry.histogram("draft_seconds").observe(done.drafted_at - done.start)
            self._count(done.outcomes)

    def trace(self, last: int | None = None) -> dict[str, Any]:
        """Return the last rounds in Chrome's trace format, which Perfetto opens.

        These are `last` rounds, or all that are kept.
        """
        kept = len(self._rounds)
        first = max(0, kept - last) if last is not None else 0
        rounds = [*islice(self._rounds, first, kept)]
        since = rounds[0].start if rounds else 0.0
        exchanges = [exchange for exchange in self._exchanges if exchange.sent_at >= since]
        events = [*_lane_names(), *(event for done in rounds for event in _round_events(done))]
        return {
            "traceEvents": events
            + [event for exchange in exchanges for event in _exchange_events(exchange)]
            + [_instant(event) for event in self._events if event.at >= since],
            "displayTimeUnit": "ms",
        }

    def _count(self, outcomes: abc.Sequence[Outcome]) -> None:
        registry = self._registry
        registry.counter("spec_decode_num_drafts_total").add(len(outcomes))
        registry.counter("spec_decode_num_draft_tokens_total").add(
            sum(outcome.proposed for outcome in outcomes)
        )
        registry.counter("spec_decode_num_accepted_tokens_total").add(
            sum(outcome.accepted for outcome in outcomes)
        )
        registry.counter("anticipation_hits_total").add(
            sum(outcome.anticipated is True for outcome in outcomes)
        )
        registry.counter("anticipation_misses_total").add(
            sum(outcome.anticipated is False for outcome in outcomes)
        )
        by_position = registry.counter("spec_decode_num_accepted_tokens_per_pos_total")
        for position in range(max(outcome.accepted for outcome in outcomes)):
            by_position.add(sum(outcome.accepted > position for outcome in outcomes), str(position))


_LANES = {"target": 1, "draft": 2, "coordinator": 3, "link": 4}


def _lane_names() -> list[dict[str, Any]]:
    """Return the names of the lanes: one for each process, and one for the link between them."""
    return [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": lane, "args": {"name": name}}
        for name, lane in _LANES.items()
    ]


def _round_events(done: Round) -> list[dict[str, Any]]:
    """Return the coordinator's events of a round.

    The pacer's decision goes with them, so that a reader can follow why gamma was chosen.
    """
    about = {
        "round": done.number,
        "sequences": done.num_sequences,
        "rows": done.num_positions,
        "prompt_tokens": done.num_prompt_tokens,
        "drafted": sum(outcome.proposed for outcome in done.outcomes),
        "accepted": sum(outcome.accepted for outcome in done.outcomes),
        "hits": sum(outcome.anticipated is True for outcome in done.outcomes),
        "misses": sum(outcome.anticipated is False for outcome in done.outcomes),
        "committed": done.num_committed,
    }
    # JSON has no infinity.
    pacer = {key: value for key, value in asdict(done.decision).items() if value != float("inf")}
    return [
        _event("round", "coordinator", done.start, done.end, about | {"pacer": pacer}),
        _event("propose", "coordinator", done.start, done.drafted_at, about),
        _event("verify", "coordinator", done.drafted_at, done.verified_at, about),
        _event("commit", "coordinator", done.verified_at, done.end, about),
    ]


def _exchange_events(exchange: Exchange) -> list[dict[str, Any]]:
    """Return what the worker did, and the time that message and answer spent on the link."""
    role, spans = exchange.role, exchange.spans
    events = [_event(span.name, role, span.start, span.end, {}) for span in spans]
    if spans:
        last = spans[-1]
        events.append(_event(f"to {role}", "link", exchange.sent_at, last.start, {}))
        events.append(_event(f"from {role}", "link", last.end, exchange.answered_at, {}))
    return events


def _event(
    name: str, lane: str, start: float, end: float, about: abc.Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": 1,
        "tid": _LANES[lane],
        "ts": start * 1e6,
        "dur": max(0.0, end - start) * 1e6,
        "args": about,
    }


def _instant(event: DeviceEvent) -> dict[str, Any]:
    return {
        "name": event.name,
        "ph": "i",
        "s": "t",
        "pid": 1,
        "tid": _LANES[event.role],
        "ts": event.at * 1e6,
        "args": dict(event.about),
    }
