"""Times, waits and kernels on a card."""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

OWN = "/specserve/"
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class PassTime:
    """Medians: until the card has done the work, and until the host has enqueued it."""

    done_ms: float
    enqueued_ms: float

    def __str__(self) -> str:
        return f"{self.done_ms:.3f} ms ({self.enqueued_ms:.3f} of the host)"


def time_work(work: Work, *, times: int = 10, warm: int = 3) -> PassTime:
    for _ in range(warm):
        work()
    done, enqueued = [], []
    for _ in range(times):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        enqueued.append(time.perf_counter() - started)
        torch.cuda.synchronize()
        done.append(time.perf_counter() - started)
    return PassTime(median(done) * 1e3, median(enqueued) * 1e3)


def time_queued(work: Work, *, times: int = 20, warm: int = 3) -> float:
    """Return milliseconds of the card alone, its work queued back to back."""
    for _ in range(warm):
        work()
    make_event: Any = torch.cuda.Event
    events = [make_event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    events[0].record(torch.cuda.current_stream())
    for _ in range(times):
        work()
    events[1].record(torch.cuda.current_stream())
    torch.cuda.synchronize()
    return float(events[0].elapsed_time(events[1])) / times


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Count the host's waits for the card by their place in our code."""
    found: Counter[str] = Counter()

    def count(*_: object, **__: object) -> None:
        frames = [frame for frame in traceback.extract_stack() if OWN in frame.filename]
        place = frames[-1] if frames else None
        found[
            "a test" if place is None else f"{place.filename.rpartition('/')[2]}:{place.lineno}"
        ] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def profile_work(work: Work) -> str:
    """Return how many kernels ran, how long the card was busy, and the longest of them."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        work()
        torch.cuda.synchronize()
    by_name: Counter[str] = Counter()
    num_kernels = 0
    for event in record.events() or ():
        if event.device_type == DeviceType.CUDA:
            num_kernels += 1
            by_name[event.name[:60]] += event.device_time
    longest = ", ".join(f"{name} {us / 1e3:.2f}" for name, us in by_name.most_common(6))
    return f"{num_kernels} kernels, busy {by_name.total() / 1e3:.2f} ms: {longest}"
