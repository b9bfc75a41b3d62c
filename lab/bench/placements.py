"""The draft apart and together with its target, over HTTP: `python -m lab.bench.placements`.

Both are served on one Ray beside one another, and measured in turns: whichever is not called is
idle. A third server says what `draft.placement: auto` takes. Prompts are held-out Python.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from ray.cluster_utils import Cluster

from specserve.cluster.launch import deploy
from specserve.cluster.proxy_settings import SERVE_SETTINGS
from specserve.cluster.ray_session import ray_session
from specserve.config.tree import DEMO, Config, config_from_keys
from specserve.demo.corpus import held_out_prompts
from specserve.models.checkpoints.widen import inflate
from specserve.tools.bench.report import machine
from specserve.tools.bench.streams import stream

PLACEMENTS = ("together", "apart", "auto")
PROMPT_TOKENS = 128
PARAMETERS = 200_000_000


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """A pair of models, with a name for the table."""

    name: str
    target: Path
    draft: Path


@dataclass(slots=True)
class Turns:
    """Tokens a second of each turn, by placement, at one number of streams."""

    streams: int
    rates: dict[str, list[float]] = field(
        default_factory=lambda: {"together": [], "apart": [], "together, plain": []}
    )

    def row(self, case: MeasuredPair, choice: str) -> str:
        ratios, plain = self._ratios("apart"), self._ratios("together, plain")
        cells = [_spread(self.rates[name], "{:.1f}") for name in self.rates]
        return (
            f"| {case.name} | {self.streams} | {' | '.join(cells)} | {_spread(ratios, '{:.2f}')} | "
            f"{_spread(plain, '{:.2f}')} | {choice.partition(',')[0]} |"
        )

    def _ratios(self, other: str) -> list[float]:
        """Return the speed together over another one, by turn."""
        pairs = zip(self.rates["together"], self.rates[other], strict=True)
        return [one / slower for one, slower in pairs]


@contextmanager
def servers(case: MeasuredPair) -> Iterator[Mapping[str, str]]:
    """Serve the pair in every placement, and yield the URLs."""
    with ExitStack() as stack:
        os.environ.update(SERVE_SETTINGS)
        nodes = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 16, "include_dashboard": False}
        )
        stack.callback(nodes.shutdown)
        configs = {placement: _config(case, placement) for placement in PLACEMENTS}
        stack.enter_context(ray_session(configs["apart"], _ignore, join=nodes.address))
        yield {
            placement: stack.enter_context(deploy(config, _ignore, owns_ray=False))
            for placement, config in configs.items()
        }


def _config(case: MeasuredPair, placement: str) -> Config:
    return config_from_keys(
        {
            "model": "pair",
            "name": placement,
            "http.port": 8124,
            "http.root_path": f"/{placement}",
            "target.path": str(case.target),
            "draft.path": str(case.draft),
            "draft.placement": placement,
            "target.threads": 1,
            "draft.threads": 1,
            "cache.pages": 1024,
        }
    )


def measure(urls: Mapping[str, str], *, streams: int, turns: int, tokens: int) -> Turns:
    """Measure one number of streams in turns; each begins with the other placement."""
    prompts = held_out_prompts(count=streams, length=PROMPT_TOKENS)
    prompts = tuple(prompts[i % len(prompts)] for i in range(streams))
    found = Turns(streams)
    for turn in range(turns + 1):
        names = list(found.rates)
        for name in names if turn % 2 else reversed(names):
            url = urls[name.split(",")[0]]
            gamma = 0 if name.endswith("plain") else None
            seconds = asyncio.run(_load(url, prompts, tokens, gamma))
            if turn:  # the first one warms up
                found.rates[name].append(streams * tokens / seconds)
    return found


async def _load(
    url: str, prompts: Sequence[tuple[int, ...]], tokens: int, gamma: int | None
) -> float:
    """Return the seconds until all answers are whole."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    bodies = [
        {
            "model": "pair",
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            **({} if gamma is None else {"speculation": {"gamma": gamma}}),
        }
        for prompt in prompts
    ]
    start = time.monotonic()
    answers = await asyncio.gather(
        *(
            stream(address.hostname, address.port, f"{address.path}/v1/completions", body)
            for body in bodies
        )
    )
    for answer in answers:
        assert answer.usage is not None, answer.body or answer.error
        assert answer.usage["completion_tokens"] == tokens
    return time.monotonic() - start


def cases(folder: Path, *, quick: bool) -> list[MeasuredPair]:
    """Make the pairs: a draft that weighs little, and one that weighs much."""
    if quick:
        return [MeasuredPair("demo pair", DEMO / "target", DEMO / "draft")]
    wide, smaller = folder / "200M", folder / "30M"
    inflate(DEMO / "target", PARAMETERS, wide)
    inflate(DEMO / "target", 30_000_000, smaller)
    return [
        MeasuredPair("target widened to 200M, demo draft", wide, DEMO / "draft"),
        MeasuredPair("target widened to 30M, a draft of 8 layers", smaller, DEMO / "target"),
        MeasuredPair("demo pair", DEMO / "target", DEMO / "draft"),
    ]


def report(
    rows: Sequence[str], choices: Mapping[str, str], *, turns: int, tokens: int, busy: float
) -> str:
    return "\n".join(
        [
            "# Where the draft lives",
            "",
            "`python -m lab.bench.placements`",
            "",
            f"{machine()}. Over HTTP, greedy, prompts of {PROMPT_TOKENS} tokens and {tokens} new "
            f"ones, {turns} turns; medians, with the least and the most. Together the two have a "
            "team of two threads, apart a thread each. The machine was busy for "
            f"{busy:.0%} before the first turn. *auto* is what the third server measured when it "
            "started, beside the two others.",
            "",
            "| pair | streams | together, tokens/s | apart | together, plain | together / apart | "
            "together / plain | auto |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            "What `auto` expected:",
            "",
            *(f"- {pair}: {choice}" for pair, choice in choices.items()),
            "",
        ]
    )


def _spread(values: Sequence[float], form: str) -> str:
    low, middle, high = (
        form.format(value) for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def _ignore(line: str) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", type=int, help="number of the only pair to measure, from 1 on")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    turns, tokens = (1, 8) if args.quick else (args.turns, 128)
    streams = [2] if args.quick else args.streams
    rows, choices, busy = [], dict[str, str](), psutil.cpu_percent(0.1 if args.quick else 5.0) / 100
    with tempfile.TemporaryDirectory() as folder:
        wanted = cases(Path(folder), quick=args.quick)
        for case in wanted if args.only is None else [wanted[args.only - 1]]:
            with servers(case) as urls:
                with urllib.request.urlopen(f"{urls['auto']}/health", timeout=60) as response:
                    choice = choices[case.name] = json.load(response)["draft_placement"]
                for count in streams:
                    found = measure(urls, streams=count, turns=turns, tokens=tokens)
                    rows.append(found.row(case, choice))
                    text = report(rows, choices, turns=turns, tokens=tokens, busy=busy)
                    print(text, flush=True)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
