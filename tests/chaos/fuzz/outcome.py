"""Measurement of a kind of input: the results counted, the slowest, and the growth of memory."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import psutil

PATIENCE_S = 60.0  # an input that takes longer hangs, on the busiest machine
TABLE_HEAD = "| input | sent | result | time | slowest | memory |\n|---|---|---|---|---|---|"


@dataclass(frozen=True, slots=True)
class FuzzOutcome:
    """Results of one kind of input."""

    input: str
    sent: int
    results: Counter[str]
    seconds: float
    slowest_ms: float
    grown_mb: float  # growth of the process after the first tenth

    @property
    def row(self) -> str:
        results = ", ".join(f"{count:,} {result}" for result, count in self.results.most_common())
        return (
            f"| {self.input} | {self.sent:,} | {results} | {self.seconds:.0f} s "
            f"| {self.slowest_ms:.1f} ms | {self.grown_mb:+.1f} MB |"
        )


def memory() -> int:
    """Return the resident bytes of this process."""
    gc.collect()
    rss: int = psutil.Process().memory_info().rss
    return rss


def measure(
    name: str, count: int, send_one: Callable[[], str], memory: Callable[[], int] = memory
) -> FuzzOutcome:
    """Send inputs and count the results. `memory` is that of the process that takes them.

    Memory growth is measured after the first tenth, because caches fill until then.
    """
    results: Counter[str] = Counter()
    slowest, first, started = 0.0, 0, time.perf_counter()
    for number in range(count):
        if number == count // 10:
            first = memory()
        sent = time.perf_counter()
        results[send_one()] += 1
        slowest = max(slowest, time.perf_counter() - sent)
    assert slowest < PATIENCE_S, f"an input took {slowest:.1f} s"
    return FuzzOutcome(
        name,
        count,
        results,
        time.perf_counter() - started,
        slowest * 1e3,
        (memory() - first) / 1e6,
    )


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.001)
