"""Passes beside processes that use a core now and then: `python -m lab.bench.neighbours`.

A team of two threads has both cores. Beside it run, in turns, nothing, a process that needs a part
of a core as a gateway does, one that takes all of it, and processes that only wake up often as
Ray's do. Every way of running
the team is tried in a process of its own; all of them are idle while one is measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import torch

from lab.bench.meters import models_of
from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts
from specserve.llm.llm import LLM
from specserve.models.checkpoints.widen import inflate
from specserve.tools.bench.report import machine
from specserve.types import Policy, VerifyStep, Warp

ROOT = Path(__file__).parents[2]
CORES = 2
PASSES = 40
PROMPT = 128
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "compiled": {},
    "compiled, GOMP_SPINCOUNT=300000": {"GOMP_SPINCOUNT": "300000"},
    "compiled, one thread": {"THREADS": "1"},
    "oneDNN": {"KERNEL": "onednn"},
}
"""Environment of each way of running the team; KERNEL and THREADS are for the server of passes.

300,000 is OpenMP's own number where it has cores enough for all threads.
"""
BUSY = """
import os, time
parent = os.getppid()
while os.getppid() == parent:  # also where that one is killed
    end = time.perf_counter() + {busy}
    while time.perf_counter() < end:
        pass
    time.sleep({idle})
"""


MULTIPLY = """
import time, numpy
one = numpy.ones((512, 512), dtype=numpy.float32)
for _ in range(20):
    one @ one
end, done = time.perf_counter() + 1.0, 0
while time.perf_counter() < end:
    one @ one
    done += 1
print(done)
"""


def speed_of_two(turns: int) -> float:
    """Return how much two processes multiply at once, as a multiple of one alone.

    It is 2 for two cores, and little more than 1 for two threads of one core.
    """

    def done(count: int) -> int:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", MULTIPLY],
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(count)
        ]
        return sum(int(process.communicate()[0]) for process in processes)

    return median(done(2) / done(1) for _ in range(turns))


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Processes that compute for `busy` seconds and sleep for `idle`, again and again."""

    name: str
    count: int
    busy: float = 0.0
    idle: float = 1.0
    own_session: bool = False  # as of other users and containers: the system divides cores by them

    @contextmanager
    def running(self) -> Iterator[float]:
        """Run them, and yield the share of a core that they have together."""
        code = BUSY.format(busy=self.busy, idle=self.idle)
        processes = [
            subprocess.Popen([sys.executable, "-c", code], start_new_session=self.own_session)
            for _ in range(self.count)
        ]
        try:
            yield self._share(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def _share(self, processes: Sequence[subprocess.Popen[bytes]]) -> float:
        """Return it as the system counts it, when all have started."""
        watched = [psutil.Process(process.pid) for process in processes]
        for process in watched:
            process.cpu_percent()
        time.sleep(0.5)
        for process in watched:
            process.cpu_percent()
        time.sleep(0.5)
        percent: float = sum(process.cpu_percent() for process in watched)
        return percent / 100


ALONE = Neighbours("nothing", 0)
NEIGHBOURS = (
    Neighbours("a fifth of a core, in pieces of 1 ms", 1, 0.001, 0.004),
    Neighbours("half of a core, in pieces of 5 ms", 1, 0.005, 0.005),
    Neighbours("one that never sleeps", 1, 1.0, 0.0),
    Neighbours("one that never sleeps in another session", 1, 1.0, 0.0, own_session=True),
    Neighbours("eight that wake up each 2 ms", 8, 0.00002, 0.002),
)


class TargetProcess:
    """A target in a process of its own, stopped unless passes are requested."""

    def __init__(self, target: Path, variables: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lab.bench.neighbours", "--serve", str(target)],
            cwd=ROOT,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def pass_seconds(self, rows: int, passes: int) -> float:
        """Run a number of passes, and return the mean seconds of one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(f"{rows} {passes}\n")
        self._process.stdin.flush()
        seconds = float(self._process.stdout.readline())
        self._process.send_signal(signal.SIGSTOP)
        return seconds

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def serve(target: Path) -> None:
    """Answer each line with the mean seconds of that many passes."""
    keys: dict[str, Any] = {
        "draft.kind": "none",
        "cache.pages": 200,
        "weights.kernel": os.environ.get("KERNEL", "auto"),
    }
    torch.set_num_threads(int(os.environ.get("THREADS", CORES)))
    with LLM(target, **keys) as llm:
        model = models_of(llm)[0]
        policy = Policy(Warp(temperature=0.0), "block", 0, PROMPT)
        prompts = held_out_prompts(count=8, length=PROMPT)
        model.verify(
            [VerifyStep(i, 0, prompt, (), None, policy) for i, prompt in enumerate(prompts)]
        )
        for line in sys.stdin:
            rows, passes = map(int, line.split())
            start = time.perf_counter()
            for turn in range(passes):
                model.verify(
                    [VerifyStep(i, PROMPT, (turn,), (), None, policy) for i in range(rows)]
                )
            print((time.perf_counter() - start) / passes, flush=True)


def measure(
    target: Path,
    settings: Sequence[str],
    others: Sequence[Neighbours],
    *,
    turns: int,
    passes: int,
    rows: Sequence[int],
) -> list[str]:
    """Return a table of these ways alone and beside the others."""
    seconds: dict[tuple[str, int, str], list[float]] = {}
    shares: dict[str, float] = {}
    with ExitStack() as stack:
        teams = {}
        for name in settings:
            teams[name] = TargetProcess(target, SETTINGS[name])
            stack.callback(teams[name].close)
            teams[name].pass_seconds(1, 1)  # until it has started
        for turn in range(-1, turns):
            for neighbours in (ALONE, *others):
                with neighbours.running() as share:
                    shares[neighbours.name] = share
                    for name, team in teams.items():
                        for count in rows:
                            found = team.pass_seconds(count, passes)
                            if turn >= 0:
                                key = name, count, neighbours.name
                                seconds.setdefault(key, []).append(found)
    return list(_table(settings, [other.name for other in others], seconds, shares, rows))


def _table(
    settings: Sequence[str],
    others: Sequence[str],
    seconds: Mapping[tuple[str, int, str], Sequence[float]],
    shares: Mapping[str, float],
    rows: Sequence[int],
) -> Iterator[str]:
    yield f"| | rows | alone, ms | {' | '.join(f'beside {name}' for name in others)} |"
    yield f"|{'---|' * (3 + len(others))}"
    fair = [f"{CORES / (CORES - shares[name]):.2f}" for name in others]
    yield f"| *what they take of two cores* | | | {' | '.join(fair)} |"
    for setting in settings:
        for count in rows:
            alone = seconds[setting, count, ALONE.name]
            ratios = [
                _spread([a / b for a, b in zip(seconds[setting, count, name], alone, strict=True)])
                for name in others
            ]
            cells = [setting, str(count), f"{median(alone) * 1e3:.1f}", *ratios]
            yield f"| {' | '.join(cells)} |"


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the report goes; the terminal by default")
    parser.add_argument("--target", type=Path, help="a model; the demo target widened by default")
    parser.add_argument("--beside", default="", metavar="NAME", help="neighbours with that in it")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    turns, passes = (1, 2) if options.quick else (options.turns, PASSES)
    settings = list(SETTINGS)[: 1 if options.quick else None]
    others = [other for other in NEIGHBOURS if options.beside in other.name]
    others = others[: 1 if options.quick else None]
    busy = mean(psutil.cpu_percent(0.5) for _ in range(1 if options.quick else 4))
    together = speed_of_two(1 if options.quick else 3)
    with tempfile.TemporaryDirectory() as scratch:
        target = options.target or DEMO / "target"
        if not options.quick and options.target is None:
            target = Path(scratch) / "wide"
            inflate(DEMO / "target", 200_000_000, target)
        rows = (1,) if options.quick else (1, 8)
        table = measure(target, settings, others, turns=turns, passes=passes, rows=rows)
    lines = [
        "# Passes beside other processes",
        "",
        "`python -m lab.bench.neighbours`",
        "",
        f"{date.today()}, {machine()}. {options.target or 'The demo target widened to 200M'}; one "
        "token of 1 and of 8 sequences a pass; "
        f"{turns} turns of {passes} passes; seconds of a pass beside others over those alone, turn "
        f"by turn. The machine was busy for {busy:.0f}% before. Two processes that multiply "
        f"matrices at once reach {together:.2f} times the speed of one alone.",
        "",
        *table,
    ]
    if options.out is None:
        print("\n".join(lines))
    else:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
