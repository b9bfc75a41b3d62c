"""Tokens a second of one replica and of four behind Ray Serve LLM, on declared devices.

`python -m lab.bench.ray_llm_scaling`, in the environment of `lab.bench.ray_llm`. A pass of a target
takes as long as `lab/bench/declared_targets.py` says, and sleeps meanwhile, so that devices which
this machine lacks do not share its cores: what is measured is everything around them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from lab.bench.declared_targets import PASS_S
from lab.bench.ray_llm import OURS, applications, ask
from specserve.demo.corpus import held_out_prompts
from specserve.tools.bench.report import machine

REPLICAS = (1, 4)
MAX_RUNNING, STREAMS = 4, 6
"""Requests that a replica serves at a time, and clients for each, so that it is never idle."""
PROMPT_LENGTH, TOKENS = 64, 48
WARMUP_S, WINDOW_S = 10.0, 30.0
GOAL = 3.6
HOOK = "worker_process_setup_hook"
"""Ray calls the function of this name in each of its processes."""


def declare_targets() -> None:
    """Let the workers that this process starts import declared_targets."""
    from specserve.cluster.engine import worker_host

    imported = worker_host.modelling_modules
    declaring = f"{__package__}.declared_targets"
    worker_host.modelling_modules = lambda config: iter([*imported(config), declaring])


def llm_config(replicas: int) -> Mapping[str, Any]:
    """Return the LLMConfig of the demo pair with this many replicas."""
    return {
        "model_loading_config": {"model_id": "demo"},
        "server_cls": "specserve.features.ray_serve_llm.server:SpecserveServer",
        "deployment_config": {"num_replicas": replicas},
        "engine_kwargs": {
            "target.threads": 1,
            "draft.threads": 1,
            "draft.placement": "together",
            "limits.max_running": MAX_RUNNING,
            "cache.pages": 500,
        },
    }


async def tokens_per_s(url: str, *, streams: int, warmup_s: float, window_s: float) -> float:
    """Keep that many clients busy; count the tokens of requests that end within the window."""
    prompts = itertools.cycle(held_out_prompts(count=64, length=PROMPT_LENGTH))
    start = time.monotonic() + warmup_s
    counted = 0

    async def client() -> None:
        nonlocal counted
        while time.monotonic() < start + window_s:
            answer = await ask(url, next(prompts), TOKENS)
            assert answer.ended is not None, "its stream broke off"
            if start <= answer.ended < start + window_s:
                counted += TOKENS

    await asyncio.gather(*(client() for _ in range(streams)))
    return counted / window_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a moment each: measures nothing")
    parser.add_argument("--out", type=Path, help="write the section here, too")
    args = parser.parse_args()
    turns = 1 if args.quick else args.turns
    warmup_s, window_s = (0.0, 4.0) if args.quick else (WARMUP_S, WINDOW_S)
    busy = psutil.cpu_percent(0.1 if args.quick else 5.0) / 100
    declare = f"{__package__}.ray_llm_scaling.{declare_targets.__name__}"
    rates: dict[int, list[float]] = {replicas: [] for replicas in REPLICAS}
    for _ in range(turns):
        for replicas, found in rates.items():
            with applications({OURS: llm_config(replicas)}, {HOOK: declare}) as urls:
                load = tokens_per_s(
                    urls[OURS],
                    streams=STREAMS * replicas,
                    warmup_s=warmup_s,
                    window_s=window_s,
                )
                found.append(asyncio.run(load))
    one, many = (rates[replicas] for replicas in REPLICAS)
    ratios = [more / less for less, more in zip(one, many, strict=True)]
    lines = [
        "## Replicas on declared devices",
        "",
        "`python -m lab.bench.ray_llm_scaling`",
        "",
        f"{date.today()}, {machine()}; ray {version('ray')}. The demo pair, each pass of a target "
        f"held to {PASS_S * 1e3:.0f} ms by sleeping; {MAX_RUNNING} requests at a time a replica, "
        f"{STREAMS} clients for each, {window_s:.0f} s after {warmup_s:.0f} s, {turns} turns. The "
        f"machine was busy for {busy:.0%} before.",
        "",
        "| replicas | tokens/s |",
        "|---|---|",
        *(
            f"| {replicas} | {median(found):.0f} ({min(found):.0f} to {max(found):.0f}) |"
            for replicas, found in rates.items()
        ),
        f"| four over one (goal {GOAL}) | {median(ratios):.2f} ({min(ratios):.2f} to "
        f"{max(ratios):.2f}) |",
    ]
    print("\n".join(lines), flush=True)
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
