"""Routing of prompts to several engines, over HTTP: `python -m lab.bench.routing`.

Four engines whose gateway looks at prefixes, four that Ray Serve's own router serves, and one with
the memory of four, on one Ray beside one another and measured in turns. Most prompts begin with one
of some shared texts, of which an engine has room for a part.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import statistics
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from ray.cluster_utils import Cluster

from lab.chaos.report import percentile_of
from specserve.cluster.launch import deploy
from specserve.cluster.proxy_settings import SERVE_SETTINGS
from specserve.cluster.ray_session import ray_session
from specserve.config.tree import Config, config_from_keys
from specserve.tools.bench.report import machine
from specserve.tools.bench.streams import stream

ENGINES = 4
PAGE = 16
VOCABULARY = 4000
SHARED_SHARE = 0.6
NEW_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of equal length; a shared one has a text of the set, and a tail of its own."""

    requests: int
    clients: int
    shared_texts: int
    shared_tokens: int
    own_tokens: int

    @property
    def pages_of_engine(self) -> int:
        """Pages of one engine of several, in which a half of the shared texts would fit."""
        return self.shared_texts * self.shared_tokens // PAGE // 2

    def prompts(self, turn: int) -> list[list[int]]:
        shared, own = random.Random(0), random.Random(turn + 1)
        texts = [shared.choices(range(VOCABULARY), k=self.shared_tokens) for _ in range(64)]
        return [
            [
                *(
                    own.choice(texts[: self.shared_texts])
                    if own.random() < SHARED_SHARE
                    else own.choices(range(VOCABULARY), k=self.shared_tokens)
                ),
                *own.choices(range(VOCABULARY), k=self.own_tokens),
            ]
            for _ in range(self.requests)
        ]


FULL = Workload(requests=160, clients=8, shared_texts=24, shared_tokens=768, own_tokens=64)
QUICK = Workload(requests=24, clients=4, shared_texts=4, shared_tokens=256, own_tokens=32)


@dataclass(slots=True)
class Measured:
    """Hit rates and times of one application, by turn."""

    hit_rates: list[float] = field(default_factory=list)
    first_tokens: list[list[float]] = field(default_factory=list)  # seconds

    def row(self, name: str) -> str:
        halves = [percentile_of(turn, 50) for turn in self.first_tokens]
        tails = [percentile_of(turn, 99) for turn in self.first_tokens]
        return (
            f"| {name} | {_spread(self.hit_rates, '{:.3f}')} | {_spread(halves, '{:.2f}')} | "
            f"{_spread(tails, '{:.2f}')} |"
        )


@contextmanager
def applications(load: Workload) -> Iterator[Mapping[str, str]]:
    """Serve the demo target in all three ways, and yield the URLs."""
    with ExitStack() as stack:
        os.environ.update(SERVE_SETTINGS)
        nodes = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 32, "include_dashboard": False}
        )
        stack.callback(nodes.shutdown)
        configs = {
            "prefix": _config(load, "prefix", engines=ENGINES),
            "queue": _config(load, "queue", engines=ENGINES),
            "one engine": _config(load, "queue", engines=1),
        }
        stack.enter_context(ray_session(configs["prefix"], _ignore, join=nodes.address))
        yield {
            name: stack.enter_context(deploy(config, _ignore, owns_ray=False))
            for name, config in configs.items()
        }


def _config(load: Workload, routing: str, *, engines: int) -> Config:
    name = f"{routing}-{engines}"
    return config_from_keys(
        {
            "model": "demo",
            "name": name,
            "http.port": 8125,
            "http.root_path": f"/{name}",
            "draft.kind": "none",
            "draft.path": None,
            "target.threads": 1,
            "cache.pages": load.pages_of_engine * ENGINES // engines,
            "limits.max_batch_tokens": 1024,
            "replicas.min": engines,
            "replicas.max": engines,
            "replicas.routing": routing,
        }
    )


def measure(
    urls: Mapping[str, str], load: Workload, *, turns: int, settle_s: float
) -> dict[str, Measured]:
    """Measure the applications in turns; the first turn, which fills caches, does not count."""
    found = {name: Measured() for name in urls}
    for turn in range(turns + 1):
        for name in list(urls)[:: 1 if turn % 2 else -1]:
            before = _counts(urls[name])
            seconds = asyncio.run(_ask_all(urls[name], load, turn))
            asyncio.run(asyncio.sleep(settle_s))  # engines report once a second
            queries, hits = (
                after - then for after, then in zip(_counts(urls[name]), before, strict=True)
            )
            if turn:
                found[name].hit_rates.append(hits / max(queries, 1.0))
                found[name].first_tokens.append(seconds)
    return found


async def _ask_all(url: str, load: Workload, turn: int) -> list[float]:
    """Return the seconds to the first token of each request, with a number of them at once."""
    address, waiting = urlsplit(url), load.prompts(turn)
    assert address.hostname is not None
    assert address.port is not None
    host, port, path = address.hostname, address.port, f"{address.path}/v1/completions"
    seconds: list[float] = []

    async def client() -> None:
        while waiting:
            body = {
                "model": "demo",
                "prompt": waiting.pop(),
                "max_tokens": NEW_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = await stream(host, port, path, body)
            assert answer.usage is not None, answer.body or answer.error
            seconds.append(answer.times[0] - answer.sent)

    await asyncio.gather(*(client() for _ in range(load.clients)))
    return seconds


def _counts(url: str) -> tuple[float, float]:
    """Return the tokens looked up in prefix caches, and those found."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    queries, hits = (
        float(re.findall(rf"^specserve_prefix_cache_{name}_total (\S+)", text, re.MULTILINE)[0])
        for name in ("queries", "hits")
    )
    return queries, hits


def report(found: Mapping[str, Measured], load: Workload, *, turns: int, busy: float) -> str:
    prefix, queue, one = (found[name] for name in ("prefix", "queue", "one engine"))
    of_one = _ratios(prefix.hit_rates, one.hit_rates)
    tails = [
        [percentile_of(turn, 99) for turn in measured.first_tokens] for measured in (prefix, queue)
    ]
    return "\n".join(
        [
            "# Routing by prefixes",
            "",
            "`python -m lab.bench.routing`",
            "",
            f"{date.today()}, {machine()}. The demo target without a draft, {ENGINES} engines of "
            f"one thread with {load.pages_of_engine} pages each, or one engine with as many as "
            f"all; {load.requests} requests a turn from {load.clients} clients, prompts of "
            f"{load.shared_tokens + load.own_tokens} tokens, of which {SHARED_SHARE:.0%} begin "
            f"with one of {load.shared_texts} texts of {load.shared_tokens} tokens; {NEW_TOKENS} "
            f"new tokens; {turns} turns, medians with the least and the most. The machine was "
            f"busy for {busy:.0%} before the first turn.",
            "",
            "| routing | prefix hit rate | first token, p50, s | first token, p99, s |",
            "|---|---|---|---|",
            *(measured.row(name) for name, measured in found.items()),
            "",
            f"Hit rate of `prefix` over that of one engine with all the memory: "
            f"{_spread(of_one, '{:.2f}')} (goal 0.95). p99 of the first token, `queue` over "
            f"`prefix`: {_spread(_ratios(tails[1], tails[0]), '{:.2f}')}.",
            "",
        ]
    )


def _ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / max(other, 1e-9) for one, other in zip(ours, others, strict=True)]


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
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    load, turns = (QUICK, 1) if args.quick else (FULL, args.turns)
    busy = psutil.cpu_percent(0.1 if args.quick else 5.0) / 100
    with applications(load) as urls:
        found = measure(urls, load, turns=turns, settle_s=2.5)
    text = report(found, load, turns=turns, busy=busy)
    print(text, flush=True)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
