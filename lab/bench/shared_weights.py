"""Shared weights beside private ones: seconds to open a model, memory of two processes, passes.

`python -m lab.bench.shared_weights` opens the demo target, widened to `--params` parameters, in
fresh processes, and compares passes in turns (A B A B) in one process. Another server's weights in
the default directory stay as they are.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch

from specserve.config.tree import DEMO
from specserve.models.checkpoints.widen import inflate
from specserve.models.model import ModelOptions, open_model
from specserve.types import Step

PREFIX = 64
ROWS = (1, 4, 8)
PASSES = 20
"""Passes that a turn takes the median of."""
OPTIONS = ModelOptions(device="cpu", pages=64)


@dataclass(frozen=True, slots=True)
class TwoProcesses:
    """Two processes that open a model one after the other."""

    name: str
    seconds: tuple[float, ...]  # to open it
    memory: tuple[float, ...]  # MiB of the first alone, and of both

    def __str__(self) -> str:
        first, second = self.seconds
        alone, both = self.memory
        return f"| {self.name} | {first:.2f} | {second:.2f} | {alone:.0f} | {both:.0f} |"


@dataclass(frozen=True, slots=True)
class PassTiming:
    """Median seconds of a pass in each turn, in private and in shared weights."""

    rows: int
    private: tuple[float, ...]
    shared: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        return [mine / theirs for mine, theirs in zip(self.shared, self.private, strict=True)]

    def __str__(self) -> str:
        ratios = self.ratios
        return (
            f"| {self.rows} | {median(self.private) * 1e3:.2f} | {median(self.shared) * 1e3:.2f} "
            f"| {median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} |"
        )


def open_twice(name: str, checkpoint: Path, options: ModelOptions) -> TwoProcesses:
    spawn = multiprocessing.get_context("spawn")
    ends, seconds, memory = [], [], []
    for _ in range(2):
        ours, theirs = spawn.Pipe()
        threads = torch.get_num_threads()
        spawn.Process(target=_hold, args=(checkpoint, options, threads, theirs)).start()
        seconds.append(ours.recv())
        ends.append(ours)
        for end in ends:
            end.send(True)
        memory.append(sum(end.recv() for end in ends))
    for end in ends:
        end.send(False)
    return TwoProcesses(name, tuple(seconds), tuple(memory))


def _hold(checkpoint: Path, options: ModelOptions, threads: int, end: Connection) -> None:
    torch.set_num_threads(threads)
    start = time.perf_counter()
    model = open_model(checkpoint, options)
    seconds = time.perf_counter() - start
    model.runner.run([Step(0, 0, (5,) * PREFIX)], [1])  # a pass maps all weights
    end.send(seconds)
    while end.recv():
        end.send(_proportional_memory())


def _proportional_memory() -> float:
    """Return this process's MiB; of a page that processes share, each has a fraction."""
    found = re.search(r"^Pss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)
    assert found is not None
    return int(found[1]) / 1024


def compare_passes(
    checkpoint: Path, shared: ModelOptions, *, turns: int, rows: Sequence[int] = ROWS
) -> list[PassTiming]:
    """Time passes of the same rows in private and in shared weights, in turns."""
    timers = {
        name: _timer(checkpoint, options)
        for name, options in {"private": OPTIONS, "shared": shared}.items()
    }
    return [_compare(timers, count, turns=turns) for count in rows]


def _compare(timers: Mapping[str, Callable[[int], float]], rows: int, *, turns: int) -> PassTiming:
    taken: dict[str, list[float]] = {name: [] for name in timers}
    for turn in range(turns):
        for name in sorted(timers, reverse=bool(turn % 2)):
            taken[name].append(timers[name](rows))
    return PassTiming(rows, tuple(taken["private"]), tuple(taken["shared"]))


def _timer(checkpoint: Path, options: ModelOptions) -> Callable[[int], float]:
    runner = open_model(checkpoint, options).runner
    runner.run([Step(0, 0, (5,) * PREFIX)], [1])

    def time_passes(rows: int) -> float:
        seconds = []
        for _ in range(PASSES + 2):
            start = time.perf_counter()
            runner.run([Step(0, PREFIX, (7,) * rows)], [rows])
            seconds.append(time.perf_counter() - start)
        return median(seconds[2:])

    return time_passes


def report(checkpoint: Path, shared: ModelOptions, *, turns: int, kinds: Sequence[str]) -> str:
    """Measure everything and return the tables; of processes, these kinds only."""
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) / 2**20
    options = {"private": OPTIONS, "shared": shared}
    lines = [
        f"Weights: {weights:.0f} MiB. `python -m lab.bench.shared_weights`, "
        f"{date.today().isoformat()}, {platform.processor() or platform.machine()}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}.",
        "",
        "| weights | first opens, s | second opens, s | memory of the first, MiB | of both |",
        "|---|---|---|---|---|",
        *(str(open_twice(kind, checkpoint, options[kind])) for kind in kinds),
        "",
        "| rows of a pass | ms, private | ms, shared | ratio | spread |",
        "|---|---|---|---|---|",
        *map(str, compare_passes(checkpoint, shared, turns=turns)),
    ]
    return "\n".join(lines)


@contextmanager
def shared_options(parent: Path | None) -> Iterator[ModelOptions]:
    """Yield options with a directory of its own for the files: in memory, or in `parent`."""
    with tempfile.TemporaryDirectory(dir=parent or "/dev/shm") as directory:
        yield ModelOptions(
            device="cpu", pages=64, shares_weights=True, weights_directory=Path(directory)
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.bench.shared_weights")
    parser.add_argument("--params", type=int, default=200_000_000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parent", type=Path, help="for the files, instead of /dev/shm")
    parser.add_argument(
        "--quick", action="store_true", help="the demo target as it is, and shared only"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with (
        tempfile.TemporaryDirectory(prefix="specserve-") as widened,
        shared_options(options.parent) as shared,
    ):
        checkpoint = DEMO / "target"
        if not options.quick:
            inflate(checkpoint, options.params, Path(widened))
            checkpoint = Path(widened)
        turns, kinds = (1, ["shared"]) if options.quick else (options.turns, ["private", "shared"])
        print(report(checkpoint, shared, turns=turns, kinds=kinds))


if __name__ == "__main__":
    main()
