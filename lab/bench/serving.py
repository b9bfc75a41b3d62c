"""Cost of serving around the engine, and throughput over HTTP: `python -m lab.bench.serving`.

With a fake engine: CPU time of proxy and gateway per chunk, and delay of the first token. With a
real engine, its target widened to 200M: throughput beside the same engine in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from lab.bench.fake_engine import TOKENS_PER_CHUNK, PacedEngine
from specserve.cluster.launch import deploy, handle
from specserve.cluster.ray_session import ray_session
from specserve.config.tree import DEMO, config_from_keys
from specserve.host import usable_cores
from specserve.llm.llm import LLM
from specserve.models.checkpoints.widen import inflate
from specserve.sampling_params import Sampling
from specserve.tools.bench.streams import Stream, stream

NUM_CLIENTS = 64
NUM_CHUNKS = 60
BATCH = 8
OUTPUT_TOKENS = 192  # long enough that staggered arrival of the requests hardly counts
TURNS = 5
PROMPT = "def read_lines(path):\n"


@dataclass(frozen=True, slots=True)
class ServingOverhead:
    """Figures of everything around the engine, with a fake engine."""

    cpu_ms: Mapping[str, float]  # per chunk, by process
    delay_one_ms: float  # of the first token, from the engine to the client, with one client
    delay_many_ms: float  # the same with NUM_CLIENTS
    longest_gap_s: float


def measure_overhead(port: int) -> ServingOverhead:
    """Serve a fake engine and load it, first with one client at a time, then with many."""
    config = config_from_keys({"http.port": port})
    with (
        ray_session(config, _ignore),
        deploy(config, _ignore, engine=PacedEngine) as url,
    ):
        asyncio.run(_load(url, clients=4, chunks=5, seed=10**6))
        single = [asyncio.run(_load(url, clients=1, chunks=3, seed=seed)) for seed in range(1, 31)]
        with _cpu_seconds() as spent:
            many = asyncio.run(_load(url, clients=NUM_CLIENTS, chunks=NUM_CHUNKS, seed=1000))
        chunks = sum(len(answer.times) for answer in many)
        assert chunks == NUM_CLIENTS * NUM_CHUNKS, (
            f"{chunks} chunks arrived of {NUM_CLIENTS * NUM_CHUNKS}"
        )
        emitted_at: Mapping[int, float] = (
            handle(config, "Engine").first_token_times.remote().result()
        )
    delays_one = [
        answer.times[0] - emitted_at[seed] for seed, (answer,) in enumerate(single, start=1)
    ]
    delays_many = [answer.times[0] - emitted_at[1000 + i] for i, answer in enumerate(many)]
    return ServingOverhead(
        {name: 1e3 * seconds / chunks for name, seconds in spent.items()},
        1e3 * statistics.median(delays_one),
        1e3 * statistics.median(delays_many),
        max(answer.longest_gap for answer in many),
    )


@dataclass(frozen=True, slots=True)
class HttpThroughput:
    """Tokens per second of each turn at one gamma, in one process and over HTTP."""

    gamma: int
    in_process: list[float]
    over_http: list[float]
    longest_gap_s: float

    @property
    def share(self) -> float:
        """Throughput over HTTP as a share of that in one process."""
        return statistics.median(
            served / direct for served, direct in zip(self.over_http, self.in_process, strict=True)
        )


def compare_throughput(port: int, target: Path) -> list[HttpThroughput]:
    """Compare throughput over HTTP with that in one process, in turns.

    Both engines are open the whole time; an idle one costs nothing.
    """
    keys = {
        "target.path": str(target),
        "draft.path": str(DEMO / "draft"),
        "target.threads": 1,
        "draft.threads": 1,
        "model": "demo",
    }
    config = config_from_keys({**keys, "http.port": port, "draft.placement": "apart"})
    with (
        LLM.from_config(config_from_keys(keys)) as llm,
        ray_session(config, _ignore),
        deploy(config, _ignore) as url,
    ):
        return [_compare_at(llm, url, gamma) for gamma in (0, 5)]


def _compare_at(llm: LLM, url: str, gamma: int) -> HttpThroughput:
    in_process, over_http, gaps = [], [], []
    for turn in range(TURNS + 1):
        start = time.monotonic()
        llm.generate(
            [PROMPT + f"    # {i}\n" for i in range(BATCH)],
            Sampling(
                max_tokens=OUTPUT_TOKENS,
                temperature=0,
                ignore_eos=True,
                speculation={"gamma": gamma},
            ),
        )
        seconds = time.monotonic() - start
        start = time.monotonic()
        streams = asyncio.run(_requests(url, gamma))
        if turn:  # the first one warms up
            in_process.append(BATCH * OUTPUT_TOKENS / seconds)
            over_http.append(BATCH * OUTPUT_TOKENS / (time.monotonic() - start))
            gaps.append(max(answer.longest_gap for answer in streams))
    return HttpThroughput(gamma, in_process, over_http, max(gaps))


async def _requests(url: str, gamma: int) -> list[Stream]:
    bodies = [
        {
            "model": "demo",
            "prompt": PROMPT + f"    # {i}\n",
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "speculation": {"gamma": gamma},
        }
        for i in range(BATCH)
    ]
    return await asyncio.gather(*(_post(url, body) for body in bodies))


async def _load(url: str, *, clients: int, chunks: int, seed: int) -> list[Stream]:
    bodies = [
        {
            "model": "demo",
            "prompt": PROMPT,
            "max_tokens": chunks * TOKENS_PER_CHUNK,
            "seed": seed + i,
        }
        for i in range(clients)
    ]
    return await asyncio.gather(*(_post(url, body) for body in bodies))


async def _post(url: str, body: Mapping[str, object]) -> Stream:
    server = urlsplit(url)
    assert server.hostname is not None
    assert server.port is not None
    answer = await stream(server.hostname, server.port, "/v1/completions", body)
    assert answer.status == 200, answer.body
    return answer


@contextmanager
def _cpu_seconds() -> Iterator[dict[str, float]]:
    """Measure the CPU seconds of the processes around the engine within the context, by name."""
    spent: dict[str, float] = {}
    before = _cpu_times()
    yield spent
    after = _cpu_times()
    for (pid, name), seconds in after.items():
        spent[name] = spent.get(name, 0.0) + seconds - before.get((pid, name), 0.0)


# Names of the processes around the engine, by a mark in their command lines.
PROCESSES = {
    "haproxy": "proxy",
    "Gateway": "gateway",
    "ProxyActor": "proxy actor",
    "HAProxyManager": "proxy actor",
}


def _cpu_times() -> dict[tuple[int, str], float]:
    seconds = {}
    for process in psutil.process_iter(["pid", "name", "cmdline"]):
        line = f"{process.info['name']} {' '.join(process.info['cmdline'] or ())}"
        for mark, name in PROCESSES.items():
            if mark in line and "lab.bench.serving" not in line:
                times = process.cpu_times()
                seconds[process.info["pid"], name] = times.user + times.system
                break
    return seconds


def _ignore(line: str) -> None:
    pass


def report(overhead: ServingOverhead, throughputs: list[HttpThroughput]) -> str:
    """Return the page of figures."""
    total = sum(overhead.cpu_ms.values())
    parts = ", ".join(f"{name} {ms:.3f}" for name, ms in sorted(overhead.cpu_ms.items()))
    lines = [
        "# Serving",
        "",
        "`python -m lab.bench.serving`",
        "",
        f"{date.today()}, {platform.machine()}, {usable_cores()} cores. CPU, lateness and "
        f"gaps: {NUM_CLIENTS} streams of {NUM_CHUNKS} chunks, an engine with a fixed pace in the "
        f"real one's place. Throughput: demo target widened to 200M, bf16, {BATCH} streams of "
        f"{OUTPUT_TOKENS} tokens, {TURNS} turns, in turn with the engine in one process; target "
        "and draft have a thread each.",
        "",
        "| figure | value | goal |",
        "|---|---|---|",
        f"| CPU outside the engine, a chunk | {total:.3f} ms ({parts}) | at most 0.25 ms |",
        f"| first token after the engine had it, 1 client, p50 | {overhead.delay_one_ms:.1f} ms | "
        "at most 10 ms |",
        f"| the same, {NUM_CLIENTS} clients | {overhead.delay_many_ms:.1f} ms | at most 40 ms |",
        f"| longest gap between two chunks of a stream, {NUM_CLIENTS} clients, a beat of 50 ms | "
        f"{overhead.longest_gap_s:.3f} s | |",
    ]
    for throughput in throughputs:
        in_process = statistics.median(throughput.in_process)
        over_http = statistics.median(throughput.over_http)
        lines.append(
            f"| throughput over HTTP / in process, gamma {throughput.gamma} | "
            f"{throughput.share:.2f} ({over_http:.0f} / {in_process:.0f} tokens/s) | at least 0.9 |"
        )
        lines.append(
            f"| longest gap between two chunks of a stream, gamma {throughput.gamma} | "
            f"{throughput.longest_gap_s:.3f} s | |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--port", type=int, default=8123)
    args = parser.parse_args()
    overhead = measure_overhead(args.port)
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "demo-200M"
        inflate(DEMO / "target", 200_000_000, target)
        throughputs = compare_throughput(args.port, target)
    text = report(overhead, throughputs)
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
