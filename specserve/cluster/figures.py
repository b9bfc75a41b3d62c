"""What a status says in numbers: gauges as they are, and what counters have grown by over the last seconds. Knows no terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specserve.api.service import Status
from specserve.metrics import Snapshot, merge

WINDOW_S = 10.0  # replicas report once a second: over less, rates would jump


@dataclass(frozen=True, slots=True)
class Figures:
    """None is what nothing was counted for."""

    replicas: int
    running: int
    waiting: int
    tokens_per_second: float
    accepted: float | None  # share of draft tokens
    mean_accepted: float | None  # tokens of a proposal
    by_position: tuple[float, ...]  # share of proposals accepted up to each position
    hit_rate: float | None  # share of proposals that lay ready
    gamma: float
    cache: Mapping[str, float]  # shares, by role
    busy: Mapping[str, float]  # likewise
    restarts: Mapping[str, int]  # all that there were, by role
    succeeded: int
    failures: Mapping[str, int]  # by HTTP status
    resumed: int
    preempted: int


class Window:
    """Keeps what was counted some seconds ago."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Snapshot]] = deque()

    def look(self, status: Status, now: float) -> Figures:
        merged = merge(status.metrics)
        self._seen.append((now, merged))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        then, before = self._seen[0]
        grown = _grown(before, merged)
        drafts, drafted = (
            grown("spec_decode_num_drafts_total"),
            grown("spec_decode_num_draft_tokens_total"),
        )
        accepted, hits = (
            grown("spec_decode_num_accepted_tokens_total"),
            grown("anticipation_hits_total"),
        )
        return Figures(
            replicas=status.replicas,
            running=int(total(merged, "num_requests_running")),
            waiting=int(total(merged, "num_requests_waiting")),
            tokens_per_second=grown("generation_tokens_total") / (now - then)
            if now > then
            else 0.0,
            accepted=_share(accepted, drafted),
            mean_accepted=_share(accepted, drafts),
            by_position=_by_position(before, merged, drafts),
            hit_rate=_share(hits, hits + grown("anticipation_misses_total")),
            gamma=_averages(merged, "gamma").get("", 0.0),
            cache=_averages(merged, "kv_cache_usage_perc"),
            busy=_averages(merged, "device_busy_fraction"),
            restarts=_counts(merged, "worker_restarts_total"),
            succeeded=int(total(merged, "request_success_total")),
            failures=_counts(merged, "request_failure_total"),
            resumed=int(total(merged, "requests_resumed_total")),
            preempted=int(total(merged, "preemptions_total")),
        )


def total(merged: Snapshot, name: str) -> float:
    """The sum over all labels."""
    return sum(sample[0] for sample in merged.samples.get(name, {}).values())


def _grown(before: Snapshot, after: Snapshot) -> Callable[[str], float]:
    """Never less than nothing: the board may have been started anew meanwhile."""
    return lambda name: max(0.0, total(after, name) - total(before, name))


def _by_position(before: Snapshot, after: Snapshot, drafts: float) -> tuple[float, ...]:
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    old, new = before.samples.get(name, {}), after.samples.get(name, {})
    counts = [
        new[labels][0] - old.get(labels, (0.0,))[0]
        for labels in sorted(new, key=lambda labels: int(labels[0]))
    ]
    while counts and counts[-1] <= 0:
        counts.pop()
    return tuple(max(0.0, count) / drafts for count in counts) if drafts else ()


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _averages(merged: Snapshot, name: str) -> dict[str, float]:
    """Gauges, by their label if they have one, averaged over those who reported them."""
    return {
        "".join(labels): value / reported
        for labels, (value, reported) in sorted(merged.samples.get(name, {}).items())
        if reported
    }


def _counts(merged: Snapshot, name: str) -> dict[str, int]:
    return {
        "".join(labels): int(sample[0])
        for labels, sample in sorted(merged.samples.get(name, {}).items())
        if sample[0]
    }
