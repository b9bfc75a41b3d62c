"""What each round did, kept as metrics and as a trace of the last ones. Knows seconds and counts; no workers, no network."""

from __future__ import annotations

from collections import abc, deque
from dataclasses import dataclass
from typing import Any

from specserve.engine.batch import Batch
from specserve.metrics import Registry
from specserve.types import Span, Verdict


@dataclass(frozen=True, slots=True)
class Round:
    """One round, by the coordinator's clock: it began, had its proposals, had its verdicts, and had committed them."""

    number: int
    begun: float
    drafted: float
    verified: float
    ended: float
    num_sequences: int
    num_prompt_tokens: int
    outcomes: tuple[tuple[int, int], ...]  # (proposed, accepted) of each sequence that had a proposal
    num_committed: int

    @classmethod
    def of(
        cls,
        batch: Batch,
        verdicts: abc.Sequence[Verdict],
        *,
        number: int,
        begun: float,
        drafted: float,
        verified: float,
        ended: float,
        num_committed: int,
    ) -> Round:
        outcomes = tuple(
            (len(row.proposal.tokens), verdict.accepted) for row, verdict in batch.pair(verdicts) if row.proposal and row.proposal.tokens
        )
        return cls(number, begun, drafted, verified, ended, len(batch.rows), batch.num_prompt_tokens, outcomes, num_committed)


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

    def trace(self) -> dict[str, Any]:
        """The last rounds in Chrome's trace format, which Perfetto opens: a track for each worker and one for the coordinator."""
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}} for track, name in enumerate(_TRACKS, start=1)
        ]
        for done in self._rounds:
            about = {
                "round": done.number,
                "sequences": done.num_sequences,
                "prompt_tokens": done.num_prompt_tokens,
                "drafted": sum(proposed for proposed, _ in done.outcomes),
                "accepted": sum(accepted for _, accepted in done.outcomes),
                "committed": done.num_committed,
            }
            spans = (("verify", done.drafted, done.verified), ("draft", done.begun, done.drafted), ("round", done.begun, done.ended))
            events += [_span(name, track, begun, ended, about) for track, (name, begun, ended) in enumerate(spans, start=1) if ended > begun]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def _count(self, outcomes: abc.Sequence[tuple[int, int]]) -> None:
        registry = self._registry
        registry.counter("spec_decode_num_drafts_total").add(len(outcomes))
        registry.counter("spec_decode_num_draft_tokens_total").add(sum(proposed for proposed, _ in outcomes))
        registry.counter("spec_decode_num_accepted_tokens_total").add(sum(accepted for _, accepted in outcomes))
        by_position = registry.counter("spec_decode_num_accepted_tokens_per_pos_total")
        for position in range(max(accepted for _, accepted in outcomes)):
            by_position.add(sum(accepted > position for _, accepted in outcomes), str(position))


_TRACKS = ("target: verify", "draft: propose", "coordinator: round")


def _span(name: str, track: int, begun: float, ended: float, about: abc.Mapping[str, int]) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": 1, "tid": track, "ts": begun * 1e6, "dur": (ended - begun) * 1e6, "args": about}
