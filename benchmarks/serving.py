"""What serving costs around the engine, and whether the engine's throughput arrives at the clients: `python -m benchmarks.serving`.

First with a metronome in the engine's place: CPU of proxy and gateway a chunk, and how late the first token is. Then with a real engine,
widened to 200M, against the same engine in one process.
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

from benchmarks.fake_engine import TOKENS, Metronome
from specserve.cluster.launch import deployed, handle
from specserve.cluster.ray_session import ray_here
from specserve.config.tree import DEMO, parse
from specserve.llm import LLM
from specserve.sampling_params import Sampling
from specserve.tools.bench.streams import Stream, stream
from specserve.tools.inflate import inflate

MANY, CHUNKS = 64, 60
BATCH, WRITTEN, TURNS = 8, 192, 5  # long enough that arriving one after the other does not count
PROMPT = "def read_lines(path):\n"


@dataclass(frozen=True, slots=True)
class Around:
    """What stands around the engine, measured with a metronome in its place."""

    cpu_ms: Mapping[str, float]  # a chunk, by process
    late_one_ms: float
    late_many_ms: float
    longest_gap_s: float


def around_the_engine(port: int) -> Around:
    config = parse({"http.port": port})
    with ray_here(config, _ignore, join=False), deployed(config, _ignore, engine=Metronome) as url:
        asyncio.run(_load(url, clients=4, chunks=5, seed=10**6))
        alone = [asyncio.run(_load(url, clients=1, chunks=3, seed=seed)) for seed in range(1, 31)]
        with _cpu_seconds() as spent:
            many = asyncio.run(_load(url, clients=MANY, chunks=CHUNKS, seed=1000))
        chunks = sum(len(one.times) for one in many)
        assert chunks == MANY * CHUNKS, f"{chunks} chunks arrived of {MANY * CHUNKS}"
        had: Mapping[int, float] = handle("Engine").first_times.remote().result()
    late_one = [one.times[0] - had[seed] for seed, (one,) in enumerate(alone, start=1)]
    late_many = [one.times[0] - had[1000 + i] for i, one in enumerate(many)]
    return Around(
        {name: 1e3 * seconds / chunks for name, seconds in spent.items()},
        1e3 * statistics.median(late_one),
        1e3 * statistics.median(late_many),
        max(one.longest_gap for one in many),
    )


@dataclass(frozen=True, slots=True)
class Through:
    """Tokens a second at one batch, in process and over HTTP, turn by turn."""

    gamma: int
    in_process: list[float]
    over_http: list[float]
    longest_gap_s: float

    @property
    def share(self) -> float:
        return statistics.median(
            there / here for there, here in zip(self.over_http, self.in_process, strict=True)
        )


def through_the_server(port: int, target: Path) -> list[Through]:
    """Both are up the whole time and take turns; an idle one costs nothing."""
    keys = {
        "target.path": str(target),
        "draft.path": str(DEMO / "draft"),
        "target.threads": 1,
        "draft.threads": 1,
        "model": "demo",
    }
    config = parse({**keys, "http.port": port})
    with (
        LLM.of(config) as llm,
        ray_here(config, _ignore, join=False),
        deployed(config, _ignore) as url,
    ):
        return [_through(llm, url, gamma) for gamma in (0, 5)]


def _through(llm: LLM, url: str, gamma: int) -> Through:
    here, there, gaps = [], [], []
    for turn in range(TURNS + 1):
        begun = time.monotonic()
        llm.generate(
            [PROMPT + f"    # {i}\n" for i in range(BATCH)],
            Sampling(
                max_tokens=WRITTEN, temperature=0, ignore_eos=True, speculation={"gamma": gamma}
            ),
        )
        seconds = time.monotonic() - begun
        begun = time.monotonic()
        streams = asyncio.run(_requests(url, gamma))
        if turn:  # the first one warms up
            here.append(BATCH * WRITTEN / seconds)
            there.append(BATCH * WRITTEN / (time.monotonic() - begun))
            gaps.append(max(one.longest_gap for one in streams))
    return Through(gamma, here, there, max(gaps))


async def _requests(url: str, gamma: int) -> list[Stream]:
    bodies = [
        {
            "model": "demo",
            "prompt": PROMPT + f"    # {i}\n",
            "max_tokens": WRITTEN,
            "temperature": 0,
            "ignore_eos": True,
            "speculation": {"gamma": gamma},
        }
        for i in range(BATCH)
    ]
    return await asyncio.gather(*(_post(url, body) for body in bodies))


async def _load(url: str, *, clients: int, chunks: int, seed: int) -> list[Stream]:
    bodies = [
        {"model": "demo", "prompt": PROMPT, "max_tokens": chunks * TOKENS, "seed": seed + i}
        for i in range(clients)
    ]
    return await asyncio.gather(*(_post(url, body) for body in bodies))


async def _post(url: str, body: Mapping[str, object]) -> Stream:
    where = urlsplit(url)
    assert where.hostname is not None
    assert where.port is not None
    answer = await stream(where.hostname, where.port, "/v1/completions", body)
    assert answer.status == 200, answer.body
    return answer


@contextmanager
def _cpu_seconds() -> Iterator[dict[str, float]]:
    """CPU seconds of the processes around the engine while the context lasts, by what they are."""
    spent: dict[str, float] = {}
    before = _cpu_times()
    yield spent
    after = _cpu_times()
    for (pid, name), seconds in after.items():
        spent[name] = spent.get(name, 0.0) + seconds - before.get((pid, name), 0.0)


AROUND = {
    "haproxy": "proxy",
    "Gateway": "gateway",
    "ProxyActor": "proxy actor",
    "HAProxyManager": "proxy actor",
}


def _cpu_times() -> dict[tuple[int, str], float]:
    found = {}
    for process in psutil.process_iter(["pid", "name", "cmdline"]):
        line = f"{process.info['name']} {' '.join(process.info['cmdline'] or ())}"
        for mark, name in AROUND.items():
            if mark in line and "bench.serving" not in line:
                times = process.cpu_times()
                found[process.info["pid"], name] = times.user + times.system
                break
    return found


def _ignore(line: str) -> None:
    pass


def report(around: Around, through: list[Through]) -> str:
    total = sum(around.cpu_ms.values())
    parts = ", ".join(f"{name} {ms:.3f}" for name, ms in sorted(around.cpu_ms.items()))
    lines = [
        "# Serving",
        "",
        "`python -m benchmarks.serving`",
        "",
        f"{date.today()}, {platform.machine()}, {psutil.cpu_count()} cores. CPU, lateness and gaps: {MANY} streams of {CHUNKS} chunks, "
        "a metronome in the engine's place. "
        f"Throughput: demo target widened to 200M, bf16, {BATCH} streams of {WRITTEN} tokens, {TURNS} turns, in turn with the engine in one process; "
        "target and draft have a thread each.",
        "",
        "| figure | value | goal |",
        "|---|---|---|",
        f"| CPU outside the engine, a chunk | {total:.3f} ms ({parts}) | at most 0.25 ms |",
        f"| first token after the engine had it, 1 client, p50 | {around.late_one_ms:.1f} ms | at most 10 ms |",
        f"| the same, {MANY} clients | {around.late_many_ms:.1f} ms | at most 40 ms |",
        f"| longest gap between two chunks of a stream, {MANY} clients, a beat of 50 ms | {around.longest_gap_s:.3f} s | |",
    ]
    for one in through:
        here, there = statistics.median(one.in_process), statistics.median(one.over_http)
        lines.append(
            f"| throughput over HTTP / in process, gamma {one.gamma} | {one.share:.2f} ({there:.0f} / {here:.0f} tokens/s) | at least 0.9 |"
        )
        lines.append(
            f"| longest gap between two chunks of a stream, gamma {one.gamma} | {one.longest_gap_s:.3f} s | |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--port", type=int, default=8123)
    args = parser.parse_args()
    around = around_the_engine(args.port)
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "demo-200M"
        inflate(DEMO / "target", 200_000_000, target)
        through = through_the_server(args.port, target)
    text = report(around, through)
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
