"""The time to the first token with and without speculation: `python -m lab.bench.first_token`.

Draft and target in one process, the target widened to 200M. Closed loops in which the pacer chooses
take turns with loops of plain decoding (A B A B). A new request starts when one ends, so that with
several streams its prompt is prefilled beside sequences that decode.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median, quantiles

from lab.bench.pipeline import widen_demo_target
from specserve.config.tree import DEMO, config_from_keys
from specserve.demo.corpus import held_out_tokens
from specserve.engine import Coordinator
from specserve.host import usable_cores
from specserve.llm.inprocess import open_parts
from specserve.types import Chunk, Request, Speculation, Warp

log = logging.getLogger(__name__)

STREAMS = (1, 8)
PROMPT = 128
TOKENS = 32
REQUESTS = 24  # of each loop, at least three for each stream
WAYS: dict[str, int | None] = {"off": 0, "on": None}
"""Gamma without and with speculation; None is the pacer's choice."""
Seconds = dict[str, list[list[float]]]
"""Seconds to the first token of each request, by way and turn."""


@dataclass(slots=True)
class FirstTokenLoop:
    """One closed loop: when each request was submitted, and when its first token came."""

    coordinator: Coordinator
    waiting: list[Request]
    submitted: dict[int, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def submit(self) -> None:
        if self.waiting:
            now = time.perf_counter()
            self.submitted[self.coordinator.submit(self.waiting.pop())] = now

    def note(self, chunks: Sequence[Chunk]) -> None:
        now = time.perf_counter()
        for chunk in chunks:
            assert chunk.error is None
            if chunk.tokens and (start := self.submitted.pop(chunk.seq_id, None)) is not None:
                self.seconds.append(now - start)
            if chunk.finish is not None:
                self.submit()


class FirstTokenMeter:
    """An engine in this process that serves one closed loop after the other."""

    def __init__(self, target: Path, *, streams: int) -> None:
        config = config_from_keys(
            {
                "target.path": str(target),
                "draft.path": str(DEMO / "draft"),
                "limits.max_running": streams,
                "cache.pages": 256 + 16 * streams,
                "cache.prefix_caching": False,  # each loop has the prompts of the others
            }
        )
        parts = open_parts(config)
        self._streams = streams
        self._loop: FirstTokenLoop | None = None
        self._coordinator = Coordinator(
            parts.target,
            parts.drafter,
            info=parts.info,
            limits=config.limits,
            speculation=config.speculation,
            emit=self._note,
            draft_context=parts.draft_context,
            drafts_prompts=False,
        )

    def measure(self, prompts: Sequence[Sequence[int]], *, gamma: int | None) -> list[float]:
        """Return the seconds to the first token of each prompt."""
        requests = [
            Request(
                tuple(prompt),
                TOKENS,
                Warp(temperature=0.0),
                seed=0,
                ignore_eos=True,
                speculation=Speculation(gamma=gamma),
            )
            for prompt in prompts
        ]
        self._loop = loop = FirstTokenLoop(self._coordinator, requests)
        for _ in range(self._streams):
            loop.submit()
        asyncio.run(self._finish())
        return loop.seconds

    async def _finish(self) -> None:
        while self._coordinator.has_work:
            await self._coordinator.round()

    def _note(self, chunks: Sequence[Chunk]) -> None:
        assert self._loop is not None
        self._loop.note(chunks)


def sweep(target: Path, *, streams: int, turns: int, requests: int) -> Seconds:
    """Measure both ways in turns, after one turn of each that does not count."""
    meter = FirstTokenMeter(target, streams=streams)
    count = max(requests, 3 * streams)
    text = held_out_tokens(PROMPT * count)
    prompts = [text[first : first + PROMPT] for first in range(0, len(text), PROMPT)]
    seconds: Seconds = {way: [] for way in WAYS}
    for turn in range(-1, turns):
        for way, gamma in WAYS.items():
            measured = meter.measure(prompts, gamma=gamma)
            if turn >= 0:
                seconds[way].append(measured)
    log.info("%d streams measured", streams)
    return seconds


def table(by_streams: dict[int, Seconds]) -> Iterator[str]:
    """Yield a line for each number of streams, with the ratios of neighbouring turns."""
    yield (
        "| streams | requests | off, median ms (turns) | on, median ms (turns) | on / off (turns) "
        "| off, p90 ms | on, p90 ms |"
    )
    yield "|---|---|---|---|---|---|---|"
    for streams, seconds in by_streams.items():
        medians = {way: [1e3 * median(turn) for turn in seconds[way]] for way in WAYS}
        ratios = [on / off for off, on in zip(medians["off"], medians["on"], strict=True)]
        p90 = [
            1e3 * quantiles([one for turn in seconds[way] for one in turn], n=10)[-1]
            for way in WAYS
        ]
        cells = [
            *(_with_spread(medians[way], digits=1) for way in WAYS),
            _with_spread(ratios, digits=3),
            *(f"{value:.1f}" for value in p90),
        ]
        num_requests = sum(map(len, seconds["on"]))
        yield f"| {streams} | {num_requests} each | {' | '.join(cells)} |"


def _with_spread(values: Sequence[float], *, digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def head(turns: int) -> list[str]:
    return [
        "# The time to the first token, with and without speculation",
        "",
        "`python -m lab.bench.first_token`",
        "",
        f"{date.today()}, {platform.system()} {platform.machine()}, {usable_cores()} cores; one "
        f"process, the demo target widened to 200M; prompts of {PROMPT} tokens, {TOKENS} tokens "
        f"each, greedy, no prefix caching; medians of {turns} turns A B A B. The load average was "
        f"{os.getloadavg()[0]:.1f} before.",
        "",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, help="where the report goes; the terminal by default")
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    options = parser.parse_args(arguments)
    requests = REQUESTS
    if options.quick:
        options.streams, options.turns, requests = [2], 1, 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    lines = head(options.turns)
    with tempfile.TemporaryDirectory() as scratch:
        params = 8_000_000 if options.quick else 200_000_000
        target = widen_demo_target(params, Path(scratch) / "wide")
        lines += table(
            {
                streams: sweep(target, streams=streams, turns=options.turns, requests=requests)
                for streams in options.streams
            }
        )
    report = "\n".join(lines) + "\n"
    if options.out is None:
        print(report)
    else:
        options.out.write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
