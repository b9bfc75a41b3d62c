"""The result of a chaos run, as a row of a Markdown table and as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lab.chaos.check import CheckCounts
from lab.chaos.faults import Fault
from specserve.tools.bench.measurement import percentile

TABLE_HEAD = (
    "| role | faults | requests | lost | truncated | different | resumed elsewhere"
    " | pause p50 | p99 | between tokens p99 | minutes |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class ChaosOutcome:
    """Faults of a chaos run, and what its clients saw."""

    faults: tuple[Fault, ...]
    counts: CheckCounts
    pauses: tuple[float, ...]  # of each stream at each fault, in seconds
    gaps: tuple[float, ...]  # between any two events of a stream, in seconds
    seconds: float
    first_failure: str | None = None


def table_row(name: str, outcome: ChaosOutcome) -> str:
    """Return the outcome as a row below TABLE_HEAD."""
    counts = outcome.counts
    num_requests = counts.complete + counts.num_failed
    cells = [
        name,
        str(len(outcome.faults)),
        str(num_requests),
        *map(str, (counts.lost, counts.truncated, counts.different, counts.resumed)),
        f"{percentile_of(outcome.pauses, 50):.2f} s",
        f"{percentile_of(outcome.pauses, 99):.2f} s",
        f"{percentile_of(outcome.gaps, 99):.2f} s",
        f"{outcome.seconds / 60:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def lines(name: str, outcome: ChaosOutcome) -> Iterator[str]:
    """Yield the outcome as lines for a terminal."""
    counts, pauses = outcome.counts, outcome.pauses
    num_requests = counts.complete + counts.num_failed
    yield (
        f"{len(outcome.faults)} faults in {name} in {outcome.seconds:.0f} s; "
        f"{num_requests} requests"
    )
    yield (
        f"  complete {counts.complete}, lost {counts.lost}, truncated {counts.truncated}, "
        f"different {counts.different}; resumed {counts.resumed}"
    )
    for kind in sorted({fault.kind for fault in outcome.faults}):
        yield f"  {kind}: {sum(fault.kind == kind for fault in outcome.faults)}"
    yield (
        f"  pause p50 {percentile_of(pauses, 50):.2f} s, p99 {percentile_of(pauses, 99):.2f} s; "
        f"between tokens p99 {percentile_of(outcome.gaps, 99):.2f} s"
    )
    if outcome.first_failure is not None:
        yield f"  first failure: {outcome.first_failure}"


def percentile_of(seconds: Sequence[float], percent: int) -> float:
    """Return a percentile of unordered values, or 0 if there are none."""
    return percentile(sorted(seconds), percent / 100) if seconds else 0.0
