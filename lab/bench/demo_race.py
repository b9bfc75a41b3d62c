"""The race of the playground on the demo pair, by the commands of a new user.

`python -m lab.bench.demo_race` starts `specserve serve` and asks the same with speculation and
without it, one stream at a time, in pairs (A B A B). The first pair comes right after the start;
its rows say how soon the pacer is right. Then again beside a process that keeps one core busy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median

from lab.bench.start import server
from specserve.tools.bench.report import machine
from tests.support.ray_server import free_port

PROMPTS = (
    "def fibonacci(n):",
    "import os\n\n",
    "class Queue:\n    def __init__(self",
    "def read_lines(path):",
    "for name in sorted(",
)
TEMPERATURES = (0.0, 1.0)
SWITCHES: Mapping[str, Mapping[str, object]] = {
    "with": {},
    "without": {"speculation": {"gamma": 0}},
}


@dataclass(frozen=True, slots=True)
class Race:
    """Tokens a second of both lanes, and whether they wrote the same text."""

    temperature: float
    fast: float
    plain: float
    is_same: bool

    @property
    def factor(self) -> float:
        return self.fast / self.plain


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10, metavar="N", help="of each temperature")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="write the page there")
    parser.add_argument("--quick", action="store_true", help="one pair of few tokens")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.tokens = 1, 8
    page = "\n".join(_page(options.pairs, options.tokens, quick=options.quick)) + "\n"
    print(page)
    if options.out is not None:
        options.out.write_text(page, encoding="utf-8")


def _page(pairs: int, tokens: int, *, quick: bool) -> Iterator[str]:
    yield "# The race on the demo pair\n"
    yield f"{date.today()}, {machine()}, load before {os.getloadavg()[0]:.1f}."
    yield "`specserve serve` as it comes: the demo pair, its target widened to 200M parameters;"
    yield f"one stream, {tokens} tokens a text, prompts included; medians of neighbouring runs."
    yield "Command: `python -m lab.bench.demo_race`.\n"
    yield "| machine | T | pairs | with, tokens/s | without, tokens/s | with / without | texts |"
    yield "|---|---|---|---|---|---|---|"
    for busy in (False,) if quick else (False, True):
        yield from _races("one core busy" if busy else "quiet", pairs, tokens, busy=busy)


def _races(name: str, pairs: int, tokens: int, *, busy: bool) -> Iterator[str]:
    """Yield the rows of one server: the first pair of each temperature, and the others."""
    port = free_port()
    with busy_core() if busy else contextlib.nullcontext(), server(port=port):
        for temperature in TEMPERATURES:
            races = [
                _race(port, PROMPTS[pair % len(PROMPTS)], temperature, tokens)
                for pair in range(pairs + 1)
            ]
            yield _row(f"{name}, first", races[:1])
            yield _row(name, races[1:])


def _row(name: str, races: Sequence[Race]) -> str:
    fast, plain, factors = (
        sorted(getattr(race, lane) for race in races) for lane in ("fast", "plain", "factor")
    )
    cells = [_spread(fast, ".0f"), _spread(plain, ".0f"), _spread(factors, ".2f")]
    same = sum(race.is_same for race in races)
    return (
        f"| {name} | {races[0].temperature:g} | {len(races)} | {' | '.join(cells)} "
        f"| {same} of {len(races)} the same |"
    )


def _spread(values: Sequence[float], style: str) -> str:
    if len(values) == 1:
        return f"{values[0]:{style}}"
    return f"{median(values):{style}} ({values[0]:{style}} to {values[-1]:{style}})"


def _race(port: int, prompt: str, temperature: float, tokens: int) -> Race:
    question = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": temperature,
        "seed": 1,
        "ignore_eos": True,
    }
    lanes = {name: _ask(port, {**question, **extra}) for name, extra in SWITCHES.items()}
    (fast, text), (plain, other) = lanes["with"], lanes["without"]
    return Race(temperature, tokens / fast, tokens / plain, text == other)


def _ask(port: int, body: Mapping[str, object]) -> tuple[float, str]:
    """Return the seconds of a request and its text."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    begun = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as reply:
        answer = json.load(reply)
    return time.perf_counter() - begun, answer["choices"][0]["text"]


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy, as another program of the user's would."""
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _spin() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    while True:
        pass


if __name__ == "__main__":
    main()
