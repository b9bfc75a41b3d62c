"""The link to a worker: round trips between two processes, and what packing and unpacking takes: `python -m benchmarks.link`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles

import numpy as np
import zmq

from specserve.cluster.transport.link import Client, Keys, Server
from specserve.types import (
    Chunk,
    DraftStep,
    Origin,
    Policy,
    Proposal,
    SparseRows,
    Verdict,
    VerifyStep,
    Warp,
)
from specserve.wire.messages import (
    Chunks,
    Message,
    Proposals,
    Propose,
    Stop,
    Verdicts,
    Verify,
    pack,
    unpack,
)

HOST = "127.0.0.1"
WARM_UP = 200
DRAFTS, SUPPORT = 5, 64


@dataclass(frozen=True, slots=True)
class Spread:
    """Of some seconds, in milliseconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        cuts = quantiles(seconds, n=100)
        return cls(cuts[49] * 1e3, cuts[98] * 1e3)

    def __str__(self) -> str:
        return f"{self.p50:.3f} | {self.p99:.3f}"


def proposals(num_sequences: int) -> Proposals:
    rng = np.random.default_rng(0)
    rows = [
        SparseRows(
            rng.integers(0, 2**17, (DRAFTS, SUPPORT)),
            rng.random((DRAFTS, SUPPORT), dtype=np.float32),
        )
        for _ in range(num_sequences)
    ]
    tokens = tuple(range(DRAFTS))
    return Proposals(
        0, tuple(Proposal(i, 400, tokens, q, 404) for i, q in enumerate(rows)), 0.001, 100
    )


def verify(num_sequences: int) -> Verify:
    steps = (
        VerifyStep(each.seq_id, 399, (7,), each.tokens, each.q, _policy(each.seq_id))
        for each in proposals(num_sequences).proposals
    )
    return Verify(0, tuple(steps))


def propose(num_sequences: int) -> Propose:
    return Propose(
        0,
        math.inf,
        tuple(DraftStep(i, 399, (7, 8), DRAFTS, _policy(i)) for i in range(num_sequences)),
    )


def verdicts(num_sequences: int) -> Verdicts:
    return Verdicts(0, tuple(Verdict(i, 3, 7, None) for i in range(num_sequences)), 0.001, 100)


def chunks(num_sequences: int) -> Chunks:
    origins = (Origin.ACCEPTED,) * 3 + (Origin.BONUS,)
    return Chunks(tuple(Chunk(i, (1, 2, 3, 4), origins) for i in range(num_sequences)))


def of_size(num_bytes: int) -> tuple[Verify, Proposals]:
    """A question and an answer of about that many bytes each, nearly all of them rows of q, as in a round."""
    num_rows = max(1, num_bytes // (8 * SUPPORT))
    q = SparseRows(
        np.ones((num_rows, SUPPORT), dtype=np.int64), np.ones((num_rows, SUPPORT), dtype=np.float32)
    )
    tokens = tuple(range(num_rows))
    asked = Verify(0, (VerifyStep(0, 399, (7,), tokens, q, _policy(0)),))
    return asked, Proposals(0, (Proposal(0, 400, tokens, q, 404),), 0.001, 100)


def size(message: Message) -> int:
    return sum(len(frame) for frame in pack(message))


def answer_all(connection: Connection, admits: bytes, num_bytes: int) -> None:
    """The worker's process."""
    server = Server(Keys.fresh(), HOST, admits)
    connection.send(server.address)
    _, answer = of_size(num_bytes)
    while isinstance(message := server.receive(), Verify):
        server.send(Proposals(message.number, answer.proposals, answer.seconds, answer.pages_used))
    server.close()


async def ask(client: Client, num_bytes: int, times: int) -> list[float]:
    """Seconds of each round trip; then the worker is told to stop."""
    asked, _ = of_size(num_bytes)
    seconds = []
    for number in range(WARM_UP + times):
        message = Verify(number, asked.steps)
        begun = time.perf_counter()
        await client.call(message, 10)
        seconds.append(time.perf_counter() - begun)
    client.post(Stop())
    return seconds[WARM_UP:]


def round_trips(
    num_bytes: int, *, times: int, loop: Callable[[], asyncio.AbstractEventLoop]
) -> Spread:
    """Packing and unpacking on both sides included."""
    keys = Keys.fresh()
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(
        target=answer_all, args=(theirs, keys.public, num_bytes)
    )
    worker.start()
    with asyncio.Runner(loop_factory=loop) as runner:
        client = Client(keys, ours.recv())
        try:
            spread = Spread.of(runner.run(ask(client, num_bytes, times)))
            worker.join(10)
        finally:
            client.close()
            worker.kill()
    return spread


def packing(message: Message, *, times: int) -> tuple[Spread, Spread]:
    packed = [bytes(frame) for frame in pack(message)]
    return Spread.of(timed(lambda: pack(message), times=times)), Spread.of(
        timed(lambda: unpack(packed), times=times)
    )


def timed(work: Callable[[], object], *, times: int) -> list[float]:
    seconds = []
    for _ in range(WARM_UP + times):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return seconds[WARM_UP:]


def loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """asyncio's own, and uvloop where it is installed, which Ray Serve prefers."""
    try:
        import uvloop
    except ImportError:
        return {"asyncio": asyncio.new_event_loop}
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def report(*, times: int) -> str:
    rows = [
        "| round trip, encrypted, both ways alike | loop | p50 ms | p99 ms |",
        "|---|---|---|---|",
    ]
    for num_bytes in (2_000, 100_000):
        for name, loop in loops().items():
            rows.append(
                f"| {num_bytes // 1000} kB | {name} | {round_trips(num_bytes, times=times, loop=loop)} |"
            )
    rows += [
        "",
        "| message | bytes | pack p50 ms | p99 ms | unpack p50 ms | p99 ms |",
        "|---|---|---|---|---|---|",
    ]
    for make in (propose, proposals, verify, verdicts, chunks):
        for num_sequences in (1, 32):
            message = make(num_sequences)
            packed, unpacked = packing(message, times=times)
            rows.append(
                f"| {type(message).__name__}, {num_sequences} sequences | {size(message):,} | {packed} | {unpacked} |"
            )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="write the report here, too")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    table = report(times=args.times)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = f"{date.today()}, {platform.machine()}, on {cores} of {os.cpu_count()} cores, ZeroMQ {zmq.zmq_version()}"
    text = f"{machine}; {args.times} times each, {DRAFTS} drafts a sequence on a support of {SUPPORT}, two processes on one host.\n\n{table}\n"
    print(text)
    if args.out:
        args.out.write_text(f"# The link to a worker\n\n`python -m benchmarks.link`\n\n{text}")


def _policy(seed: int) -> Policy:
    return Policy(Warp(), "block", seed, 100)


if __name__ == "__main__":
    main()
