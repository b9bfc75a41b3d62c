"""The row that a siege makes in a table of sieges, and the lines that tell of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specserve.tools.bench.chaos.run import Outcome
from specserve.tools.bench.measurement import percentile

HEAD = (
    "| struck | blows | requests | lost | truncated | different | went on elsewhere | pause p50 | p99 | between tokens p99 | minutes |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def row(name: str, outcome: Outcome) -> str:
    tally = outcome.tally
    num_requests = tally.complete + tally.num_failed
    middle, worst = at(outcome.pauses, 50), at(outcome.pauses, 99)
    counts = f"{tally.lost} | {tally.truncated} | {tally.different} | {tally.resumed}"
    times = " | ".join(f"{seconds:.2f} s" for seconds in (middle, worst, at(outcome.usual, 99)))
    return f"| {name} | {len(outcome.blows)} | {num_requests} | {counts} | {times} | {outcome.seconds / 60:.1f} |"


def lines(name: str, outcome: Outcome) -> Iterator[str]:
    tally = outcome.tally
    yield f"{len(outcome.blows)} blows at {name} in {outcome.seconds:.0f} s; {tally.complete + tally.num_failed} requests"
    yield f"  complete {tally.complete}, lost {tally.lost}, truncated {tally.truncated}, different {tally.different}; resumed {tally.resumed}"
    for how in sorted({blow.how for blow in outcome.blows}):
        yield f"  {how}: {sum(blow.how == how for blow in outcome.blows)}"
    yield f"  pause p50 {at(outcome.pauses, 50):.2f} s, p99 {at(outcome.pauses, 99):.2f} s; between tokens p99 {at(outcome.usual, 99):.2f} s"
    if outcome.first_wrong is not None:
        yield f"  first that went wrong: {outcome.first_wrong}"


def at(seconds: Sequence[float], percent: int) -> float:
    return percentile(sorted(seconds), percent / 100) if seconds else 0.0
