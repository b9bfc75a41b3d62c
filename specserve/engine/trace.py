"""What each round did, kept as metrics and as a trace of the last ones. Knows seconds and counts; no workers, no network."""

from __future__ import annotations

from collections import abc, deque
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from specserve.engine.batch import Batch, Outcome
from specserve.engine.pacer import Decision
from specserve.metrics import Registry
from specserve.types import Span


@dataclass(frozen=True, slots=True)
class Round:
    """One round, by the coordinator's clock: it began, had its proposals, had its verdicts, and had committed them."""

    number: int
    begun: float
    drafted: float
    verified: float
    ended: float
    num_sequences: int
    num_rows: int  # of the target's pass
    num_prompt_tokens: int
    outcomes: tuple[Outcome, ...]  # of the sequences that had a proposal
    num_committed: int
    decision: Decision  # of the pacer, by which it was drafted for

    @classmethod
    def of(
        cls,
        batch: Batch,
        outcomes: tuple[Outcome, ...],
        decision: Decision,
        *,
        number: int,
        begun: float,
        drafted: float,
        verified: float,
        ended: float,
        num_committed: int,
    ) -> Round:
        times = (begun, drafted, verified, ended)
        return cls(
            number,
            *times,
            len(batch.rows),
            batch.num_rows,
            batch.num_prompt_tokens,
            outcomes,
            num_committed,
            decision,
        )


@dataclass(frozen=True, slots=True)
class Exchange:
    """A message to a worker and its answer, and what the worker did since its last one, by the coordinator's clock."""

    role: str  # target or draft
    sent: float
    answered: float
    spans: tuple[Span, ...]


class Journal:
    """Takes rounds and exchanges in; gives counters, histograms and a trace out."""

    def __init__(self, registry: Registry, *, kept: int = 2000) -> None:
        self._registry = registry
        self._rounds: deque[Round] = deque(maxlen=kept)
        self._exchanges: deque[Exchange] = deque(maxlen=2 * kept)

    def exchange(self, done: Exchange) -> None:
        self._exchanges.append(done)

    def record(self, done: Round) -> None:
        self._rounds.append(done)
        self._registry.histogram("round_seconds").observe(done.ended - done.begun)
        self._registry.histogram("verify_seconds").observe(done.verified - done.drafted)
        if done.outcomes:
            self._registry.histogram("draft_seconds").observe(done.drafted - done.begun)
            self._count(done.outcomes)

    def trace(self, last: int | None = None) -> dict[str, Any]:
        """The last rounds, all that are kept or so many, in Chrome's trace format, which Perfetto opens."""
        kept = len(self._rounds)
        rounds = [*islice(self._rounds, max(0, kept - last) if last is not None else 0, kept)]
        since = rounds[0].begun if rounds else 0.0
        exchanges = [done for done in self._exchanges if done.sent >= since]
        events = [*_names(), *(event for done in rounds for event in _round_events(done))]
        return {
            "traceEvents": events
            + [event for done in exchanges for event in _exchange_events(done)],
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


def _names() -> list[dict[str, Any]]:
    """Every lane is one actor's, but the last, which shows what lies between them."""
    return [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": lane, "args": {"name": name}}
        for name, lane in _LANES.items()
    ]


def _round_events(done: Round) -> list[dict[str, Any]]:
    """Of the coordinator. What the pacer saw goes with the round, so that a reader can follow why it was drafted for like this."""
    about = {
        "round": done.number,
        "sequences": done.num_sequences,
        "rows": done.num_rows,
        "prompt_tokens": done.num_prompt_tokens,
        "drafted": sum(outcome.proposed for outcome in done.outcomes),
        "accepted": sum(outcome.accepted for outcome in done.outcomes),
        "hits": sum(outcome.anticipated is True for outcome in done.outcomes),
        "misses": sum(outcome.anticipated is False for outcome in done.outcomes),
        "committed": done.num_committed,
    }
    pacer = {
        key: value for key, value in asdict(done.decision).items() if value != float("inf")
    }  # which JSON does not know
    return [
        _event("round", "coordinator", done.begun, done.ended, about | {"pacer": pacer}),
        _event("propose", "coordinator", done.begun, done.drafted, about),
        _event("verify", "coordinator", done.drafted, done.verified, about),
        _event("commit", "coordinator", done.verified, done.ended, about),
    ]


def _exchange_events(done: Exchange) -> list[dict[str, Any]]:
    """What the worker did, and what its last message and answer spent on the way."""
    events = [_event(span.name, done.role, span.begun, span.ended, {}) for span in done.spans]
    if done.spans:
        events.append(_event(f"to {done.role}", "link", done.sent, done.spans[-1].begun, {}))
        events.append(_event(f"from {done.role}", "link", done.spans[-1].ended, done.answered, {}))
    return events


def _event(
    name: str, lane: str, begun: float, ended: float, about: abc.Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": 1,
        "tid": _LANES[lane],
        "ts": begun * 1e6,
        "dur": max(0.0, ended - begun) * 1e6,
        "args": about,
    }
